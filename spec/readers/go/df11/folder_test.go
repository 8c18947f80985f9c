package df11

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"df11go/blake3"
)

func besideOf(path, content string) *File {
	return &File{Kind: FileBeside, Path: path, Length: uint64(len(content)),
		Hash: blake3.Sum256([]byte(content))}
}

func TestMark(t *testing.T) {
	if len(mark) != 51 {
		t.Fatalf("the mark has %d bytes", len(mark))
	}
	const content = " \n{\"a\": 1}"
	marked := strings.Replace(content, "{", "{"+mark, 1)
	cases := []struct {
		path, stored, original string
		good                   bool
	}{
		{"config.json", content, content, true},
		{"config.json", marked, content, true},
		{"config.json", marked, marked, true},
		{"sub/config.json", marked, content, true},
		{"other.json", marked, content, false},
		{"config.json", "x" + marked, "x" + content, false},
		{"config.json", marked + " ", content, false},
		{"config.json", "", content, false},
		{"config.json", mark, "", false},
	}
	for i, c := range cases {
		m := &Model{Folder: t.TempDir()}
		name := filepath.Join(m.Folder, c.path)
		_ = os.MkdirAll(filepath.Dir(name), 0o777)
		if err := os.WriteFile(name, []byte(c.stored), 0o666); err != nil {
			t.Fatal(err)
		}
		b, err := m.findBeside(besideOf(c.path, c.original))
		if (err == nil) != c.good {
			t.Errorf("case %d: %v", i, err)
		}
		var out strings.Builder
		if err == nil && (b.copyTo(&out) != nil || out.String() != c.original) {
			t.Errorf("case %d: restored %q", i, out.String())
		}
	}
	m := &Model{Folder: t.TempDir()}
	if _, err := m.findBeside(besideOf("missing", "")); KindOf(err) != Corrupt {
		t.Error(err)
	}
}

func TestCreateFile(t *testing.T) {
	out := t.TempDir()
	write := func(w io.Writer) error { _, err := io.WriteString(w, "x"); return err }
	fails := func(io.Writer) error { return errors.New("no") }
	long := strings.Repeat(strings.Repeat("d", 255)+"/", 15) + strings.Repeat("e", 256-1)
	for _, path := range []string{"a", "b/c/d", long} {
		if err := createFile(out, path, write); err != nil {
			t.Error(err)
		}
	}
	_ = os.Symlink(t.TempDir(), filepath.Join(out, "link"))
	_ = os.Symlink(filepath.Join(t.TempDir(), "new"), filepath.Join(out, "dangling"))
	for _, path := range []string{"a", "a/b", "link/x", "dangling", "b/c"} {
		if err := createFile(out, path, write); err == nil {
			t.Errorf("%s was created", path)
		}
	}
	if err := createFile(out, "failed", fails); err == nil {
		t.Error("no error")
	}
	if _, err := os.Lstat(filepath.Join(out, "failed")); err == nil {
		t.Error("a failed file is still there")
	}
}
