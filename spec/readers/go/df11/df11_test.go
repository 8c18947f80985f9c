package df11

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"df11go/blake3"
)

// No vector has these: members that are missing, and one offset.
func TestEntries(t *testing.T) {
	for _, entry := range []string{
		`"shape":[1],"data_offsets":[0,1]`, `"dtype":"U8","data_offsets":[0,1]`,
		`"dtype":"U8","shape":[1]`, `"dtype":"U8","shape":[1],"data_offsets":[0]`,
	} {
		h := `{"a":{` + entry + `}}`
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...)
		if err := try(func() { parsePrefix(b) }); KindOf(err) != Corrupt {
			t.Errorf("%s: %v", h, err)
		}
	}
}

func TestMark(t *testing.T) {
	const content = " \n{\"a\": 1}"
	marked := strings.Replace(content, "{", "{"+mark, 1)
	for i, c := range []struct {
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
		{"missing", "", "", false},
	} {
		m := &Model{Folder: t.TempDir()}
		name := filepath.Join(m.Folder, c.path)
		if c.path != "missing" {
			_ = os.MkdirAll(filepath.Dir(name), 0o777)
			_ = os.WriteFile(name, []byte(c.stored), 0o666)
		}
		f := File{Length: uint64(len(c.original)), Hash: blake3.Sum256([]byte(c.original))}
		var found []byte
		err := try(func() { found = m.findBeside(original{File: &f, path: c.path}) })
		if c.good && (err != nil || string(found) != c.original) {
			t.Errorf("case %d: %q, %v", i, found, err)
		}
		if !c.good && KindOf(err) != Corrupt {
			t.Errorf("case %d: %v", i, err)
		}
	}
}

func TestCreateFile(t *testing.T) {
	out := t.TempDir()
	create := func(path string) error {
		return try(func() { createFile(out, path, nil) })
	}
	long := strings.Repeat(strings.Repeat("d", 255)+"/", 15) + strings.Repeat("e", 256-1)
	for _, path := range []string{"a", "b/c/d", long} {
		if err := create(path); err != nil {
			t.Error(err)
		}
	}
	_ = os.Symlink(t.TempDir(), filepath.Join(out, "link"))
	_ = os.Symlink(filepath.Join(t.TempDir(), "new"), filepath.Join(out, "dangling"))
	for _, path := range []string{"a", "a/b", "link/x", "dangling", "b/c"} {
		if create(path) == nil {
			t.Errorf("%s was created", path)
		}
	}
}
