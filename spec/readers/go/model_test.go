package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"df11go/df11"
)

func open(t *testing.T, name string) *df11.Container {
	t.Helper()
	b := load(t, "valid/"+name+".df11.gz")
	c, err := df11.Open(bytes.NewReader(b), uint64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Shards make a model in any order; one twice, or one of another model, does
// not (8).
func TestShards(t *testing.T) {
	first, second := open(t, "shard-1-of-2"), open(t, "shard-2-of-2")
	m, err := df11.NewModel(second, first)
	if err != nil {
		t.Fatal(err)
	}
	if r := m.Verify(); r.Exit() != 0 {
		t.Errorf("verification: %v %v", r.Wrong, r.Unchecked)
	}
	if _, err := df11.NewModel(first, first); err == nil {
		t.Error("one shard twice")
	}
	if _, err := df11.NewModel(first, open(t, "smallest")); err == nil {
		t.Error("shards of two models")
	}
}

// Every valid vector is restored into a folder, and never a second time.
func TestRestore(t *testing.T) {
	for _, v := range manifest(t) {
		if !v.Expect.has("valid") {
			continue
		}
		b := bytesOf(t, v)
		c, err := df11.Open(bytes.NewReader(b), uint64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		m, err := df11.NewModel(c)
		if err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		if r := m.Restore(out); r.Broken != nil || len(r.Wrong) > 0 {
			t.Errorf("%s: %v %v", v.File, r.Broken, r.Wrong)
		}
		for path, want := range v.Files {
			if len(path) > 4000 {
				continue // longer than what one call of the system takes
			}
			b, err := os.ReadFile(filepath.Join(out, path))
			if err != nil || sum(b) != want {
				t.Errorf("%s: %s: %v", v.File, path, err)
			}
		}
		if r := m.Restore(out); len(v.Files) > 0 && r.Broken == nil {
			t.Errorf("%s was restored over itself", v.File)
		}
	}
}
