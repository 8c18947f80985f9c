package df11

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// createFile creates a file below a folder, which it never leaves (7): it goes
// down folder by folder, follows no links, and overwrites nothing. A path of
// 4096 bytes is longer than what one call of the system takes.
func createFile(out, path string, write func(io.Writer) error) error {
	components := strings.Split(path, "/")
	folder, err := syscall.Open(out, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	for _, c := range components[:len(components)-1] {
		if err != nil {
			break
		}
		folder, err = enterFolder(folder, c)
	}
	if err != nil {
		return fmt.Errorf("a folder of %q: %w", path, err)
	}
	defer syscall.Close(folder)
	name := components[len(components)-1]
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_CLOEXEC
	fd, err := syscall.Openat(folder, name, flags, 0o666)
	if err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	file := os.NewFile(uintptr(fd), name)
	err = write(file)
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		_ = syscall.Unlinkat(folder, name)
	}
	return err
}

// enterFolder opens a folder in a folder, makes it if there is none, and closes
// the outer one.
func enterFolder(folder int, name string) (int, error) {
	defer syscall.Close(folder)
	err := syscall.Mkdirat(folder, name, 0o777)
	if err != nil && !errors.Is(err, syscall.EEXIST) {
		return -1, err
	}
	const flags = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NOFOLLOW | syscall.O_CLOEXEC
	return syscall.Openat(folder, name, flags, 0)
}
