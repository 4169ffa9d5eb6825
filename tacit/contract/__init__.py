"""What a method is: its four verbs, what each party may see, what may travel."""
