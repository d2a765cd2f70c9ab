def page(program, machine):
    return ""
