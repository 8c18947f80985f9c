package df11

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// Restore writes the original files of a model into a folder. It goes on after
// a file that it cannot restore, and removes what it wrote of it. Files beside
// are looked at first, since one that was changed refuses the model (8).
func (m *Model) Restore(out string) *Report {
	r := &Report{}
	beside := map[*File]besideFile{}
	for _, f := range m.files() {
		if f.Kind != FileBeside || m.Folder == "" {
			continue
		}
		b, err := m.findBeside(f)
		if !r.add(err) {
			return r
		}
		beside[f] = b
	}
	if !r.add(m.checkSpace(out)) {
		return r
	}
	for _, c := range m.Shards {
		byFile := c.tensorsByFile()
		for i := range c.Files {
			f := &c.Files[i]
			if b, ok := beside[f]; ok {
				r.add(createFile(out, f.Path, b.copyChecked(f)))
			} else if f.Kind == FileBeside {
				r.skip("file %q beside the container: its folder is not known", f.Path)
			} else {
				r.add(c.restoreFile(out, f, byFile[i]))
			}
		}
	}
	return r
}

// copyChecked copies a file that was found right, and checks it once more.
func (b besideFile) copyChecked(f *File) func(io.Writer) error {
	return func(w io.Writer) error {
		if good, err := b.matches(f); err != nil || !good {
			return corrupt("file %q beside the container was changed: %v", f.Path, err)
		}
		return b.copyTo(w)
	}
}

// restoreFile creates nothing if the directory alone tells that the file
// cannot be restored.
func (c *Container) restoreFile(out string, f *File, tensors []*Tensor) error {
	if err := c.checkSupported(f, tensors); err != nil {
		return err
	}
	if f.Kind == FileWeights {
		if err := c.checkCover(f, tensors); err != nil {
			return err
		}
	}
	return createFile(out, f.Path, func(w io.Writer) error {
		return c.writeFile(f, tensors, w)
	})
}

// checkSpace creates the folder, and looks whether the files have room.
func (m *Model) checkSpace(out string) error {
	if err := os.MkdirAll(out, 0o777); err != nil {
		return err
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(out, &s); err != nil {
		return nil // not known
	}
	free, ok := mul(s.Bavail, uint64(s.Bsize))
	for _, c := range m.Shards {
		byFile := c.tensorsByFile()
		for i := range c.Files {
			f := &c.Files[i]
			if c.checkSupported(f, byFile[i]) != nil {
				continue
			}
			if ok && f.Length > free {
				return fmt.Errorf("no space for %q", f.Path)
			}
			free -= minU64(free, f.Length)
		}
	}
	return nil
}
