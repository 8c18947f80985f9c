package df11

import (
	"bufio"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"df11go/blake3"
)

// mark is what config.json may carry after its first brace (8, Folders).
const mark = "\n  \"quantization_config\": {\"quant_method\": \"df11\"},"

// besideFile is a file that was found to be the original, with or without the
// mark.
type besideFile struct {
	name   string
	marked bool
	brace  int64 // where the mark begins, if there is one
}

// findBeside looks for a file of kind beside in the folder.
func (m *Model) findBeside(f *File) (besideFile, error) {
	b := besideFile{name: filepath.Join(m.Folder, filepath.FromSlash(f.Path))}
	info, err := os.Stat(b.name)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && !info.Mode().IsRegular()) {
		return b, corrupt("file %q is missing beside the container", f.Path)
	}
	if err != nil {
		return b, err
	}
	size := uint64(info.Size())
	good, err := false, error(nil)
	if size == f.Length {
		good, err = b.matches(f)
	} else if size-uint64(len(mark)) == f.Length && path.Base(f.Path) == "config.json" {
		b.marked = true
		good, err = b.matches(f)
	}
	if err == nil && !good {
		err = corrupt("file %q beside the container was changed", f.Path)
	}
	return b, err
}

func (b *besideFile) matches(f *File) (bool, error) {
	h := blake3.New()
	err := b.copyTo(h)
	return err == nil && h.Sum() == f.Hash, err
}

// copyTo writes the original. It writes a file without the mark as it is if it
// turns out to have none.
func (b *besideFile) copyTo(w io.Writer) error {
	in, err := os.Open(b.name)
	if err != nil {
		return err
	}
	defer in.Close()
	if b.marked {
		if b.brace, err = findMark(in); err != nil {
			return err
		}
		if b.brace >= 0 {
			if _, err := io.CopyN(w, in, b.brace); err != nil {
				return err
			}
			if _, err := in.Seek(int64(len(mark)), io.SeekCurrent); err != nil {
				return err
			}
		}
	}
	_, err = io.Copy(w, in)
	return err
}

// findMark returns where the mark begins, or -1, and goes back to the start.
func findMark(in io.ReadSeeker) (int64, error) {
	at, found := int64(0), false
	r := bufio.NewReader(in)
	b, err := r.ReadByte()
	for ; err == nil && strings.IndexByte(" \t\n\r", b) >= 0; at++ {
		b, err = r.ReadByte()
	}
	if err == nil && b == '{' {
		next := make([]byte, len(mark))
		_, err = io.ReadFull(r, next)
		found = err == nil && string(next) == mark
	}
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return 0, err
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	if !found {
		return -1, nil
	}
	return at + 1, nil
}
