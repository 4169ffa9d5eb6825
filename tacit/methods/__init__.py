"""One file, one method. The file's name is the method's name; there is no other registration."""
