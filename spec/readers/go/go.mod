module df11go

go 1.19
