// The module has the name with which the go_package options of the protos begin.
module tokenwire

go 1.19
