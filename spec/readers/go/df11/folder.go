package df11

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
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
	Unsupported.when(m.Folder == "", "file %q lies beside; its folder is not known", f.path)
	name := filepath.Join(m.Folder, filepath.FromSlash(f.path))
	info, err := os.Stat(name)
	missing := errors.Is(err, fs.ErrNotExist) || (err == nil && !info.Mode().IsRegular())
	Corrupt.when(missing, "file %q is missing beside the container", f.path)
	check(err)
	b, err := os.ReadFile(name)
	check(err)
	if path.Base(f.path) == "config.json" && uint64(len(b)) != f.Length {
		b = unmarked(b)
	}
	changed := uint64(len(b)) != f.Length || blake3.Sum256(b) != f.Hash
	Corrupt.when(changed, "file %q beside the container was changed", f.path)
	return b
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
	r, content := &Report{}, map[string]func() []byte{}
	for _, f := range m.files() {
		f := f
		content[f.path] = f.content
		if f.Kind == FileBeside {
			content[f.path] = func() []byte { return m.findBeside(f) }
			if m.Folder != "" && !r.try(func() { m.findBeside(f) }) {
				return r
			}
		}
	}
	if !r.try(func() { m.checkSpace(out) }) {
		return r
	}
	for _, f := range m.files() {
		r.try(func() { createFile(out, f.path, content[f.path]()) })
	}
	return r
}

// checkSpace creates the folder, and looks whether the files have room.
func (m *Model) checkSpace(out string) {
	check(os.MkdirAll(out, 0o777))
	var s syscall.Statfs_t
	if syscall.Statfs(out, &s) != nil {
		return // not known
	}
	blocks := s.Bavail
	for _, f := range m.files() {
		if f.Kind == FileBeside || try(f.checkCover) == nil {
			need := ceilDiv(f.Length, uint64(s.Bsize))
			if need > blocks {
				check(fmt.Errorf("no space for %q", f.path))
			}
			blocks -= need
		}
	}
}

// createFile creates a file below a folder, which it never leaves (7): it goes
// down folder by folder, follows no links, and overwrites nothing. A path of
// 4096 bytes is longer than what one call of the system takes.
func createFile(out, path string, content []byte) {
	const inside = syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_CLOEXEC
	folder, err := syscall.Open(out, inside, 0)
	components := strings.Split(path, "/")
	name := components[len(components)-1]
	for _, c := range components[:len(components)-1] {
		if err == nil {
			_ = syscall.Mkdirat(folder, c, 0o777) // that it is there is what the next call shows
			outer := folder
			folder, err = syscall.Openat(outer, c, inside|syscall.O_NOFOLLOW, 0)
			syscall.Close(outer)
		}
	}
	fd := -1
	if err == nil {
		defer syscall.Close(folder)
		const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_CLOEXEC
		fd, err = syscall.Openat(folder, name, flags, 0o666)
	}
	if err != nil {
		check(fmt.Errorf("%q: %w", path, err))
	}
	file := os.NewFile(uintptr(fd), name)
	_, err = file.Write(content)
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		_ = syscall.Unlinkat(folder, name)
		check(err)
	}
}
