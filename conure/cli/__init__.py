"""The command line `conure`.

    main                  the table of commands, the parser, exit codes
    command               what commands share: errors, the address of the server
    terminal              tables, durations and the live view of a program
    submission_file       the program file and the inputs of `conure run`
    program_ids           programs by the first digits of their ids
    shown_notices         the notices that this user has seen
    delayed_connection    the network that `conure demo` emulates
    commands/             one module per command

The module of a command is imported when the command is used, so that `conure run` loads neither
torch nor litestar.
"""
