package df11

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"df11go/blake3"
)

// mark is what config.json may carry after its first brace (8, Folders).
const mark = "\n  \"quantization_config\": {\"quant_method\": \"df11\"},"

// findBeside looks for a file of kind beside in the folder, and returns the
// original, which a mark may have been added to.
func (m *Model) findBeside(f original) []byte {
	name := filepath.Join(m.Folder, filepath.FromSlash(f.path))
	b, err := readRegular(name, f.Length+uint64(len(mark)))
	missing := errors.Is(err, fs.ErrNotExist)
	Corrupt.when(missing, "file %q is missing beside the container", f.path)
	check(err)
	if path.Base(f.path) == "config.json" && uint64(len(b)) != f.Length {
		b = unmarked(b)
	}
	changed := uint64(len(b)) != f.Length || blake3.Sum256(b) != f.Hash
	Corrupt.when(changed, "file %q beside the container was changed", f.path)
	return b
}

// readRegular reads a file, as far as a byte after most; none exists if it is
// no regular file.
func readRegular(name string, most uint64) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fs.ErrNotExist
	}
	in, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(io.LimitReader(in, int64(most)+1))
}

// unmarked returns the file without the mark, or as it is.
func unmarked(b []byte) []byte {
	brace := len(b) - len(bytes.TrimLeft(b, " \t\n\r")) + 1
	if strings.HasPrefix(string(b[brace-1:]), "{"+mark) {
		return append(b[:brace:brace], b[brace+len(mark):]...)
	}
	return b
}

// Restore writes the original files of a model into a folder. It goes on after
// a file that it cannot restore, and removes what it wrote of it. Files beside
// are looked at first, since one that was changed refuses the model (8).
func (m *Model) Restore(out string) *Report {
	r := &Report{}
	for _, f := range m.files() {
		if f.Kind == FileBeside && m.Folder != "" && !r.try(func() { m.findBeside(f) }) {
			return r
		}
	}
	if !r.try(func() { m.checkSpace(out) }) {
		return r
	}
	for _, f := range m.files() {
		if f.Kind == FileBeside && m.Folder == "" {
			r.skip("file %q beside the container: its folder is not known", f.path)
		} else {
			r.try(func() { m.restoreFile(out, f) })
		}
	}
	return r
}

// restoreFile creates nothing if the directory alone tells that the file
// cannot be restored.
func (m *Model) restoreFile(out string, f original) {
	tensors := f.c.tensorsByFile()[f.i]
	if f.Kind != FileBeside {
		f.c.checkCover(f.File, tensors)
	}
	createFile(out, f.path, func(w io.Writer) {
		if f.Kind == FileBeside {
			_, err := w.Write(m.findBeside(f))
			check(err)
		} else {
			f.c.writeFile(f.File, tensors, w)
		}
	})
}

// checkSpace creates the folder, and looks whether the files have room.
func (m *Model) checkSpace(out string) {
	check(os.MkdirAll(out, 0o777))
	var s syscall.Statfs_t
	if err := syscall.Statfs(out, &s); err != nil {
		return // not known
	}
	if s.Bavail > math.MaxInt64/uint64(s.Bsize) {
		return
	}
	free := s.Bavail * uint64(s.Bsize)
	for _, f := range m.files() {
		tensors := f.c.tensorsByFile()[f.i]
		if try(func() { f.c.checkCover(f.File, tensors) }) != nil {
			continue
		}
		if f.Length > free {
			check(fmt.Errorf("no space for %q", f.path))
		}
		free -= f.Length
	}
}

// createFile creates a file below a folder, which it never leaves (7): it goes
// down folder by folder, follows no links, and overwrites nothing. A path of
// 4096 bytes is longer than what one call of the system takes.
func createFile(out, path string, write func(io.Writer)) {
	components := strings.Split(path, "/")
	folder, err := syscall.Open(out, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	for _, c := range components[:len(components)-1] {
		if err != nil {
			break
		}
		folder, err = enterFolder(folder, c)
	}
	if err != nil {
		check(fmt.Errorf("a folder of %q: %w", path, err))
	}
	defer syscall.Close(folder)
	name := components[len(components)-1]
	const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_CLOEXEC
	fd, err := syscall.Openat(folder, name, flags, 0o666)
	if err != nil {
		check(fmt.Errorf("%q: %w", path, err))
	}
	file := os.NewFile(uintptr(fd), name)
	err = try(func() { write(file) })
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		_ = syscall.Unlinkat(folder, name)
		check(err)
	}
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
