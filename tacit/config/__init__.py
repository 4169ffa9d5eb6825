"""From a name, a file or a folder of images to a complete experiment."""
