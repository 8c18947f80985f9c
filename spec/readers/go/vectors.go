package main

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"df11go/df11"
)

// vector is a row of the manifest (vectors/README.md).
type vector struct {
	File, Sha256, Level, Result, About string
	Base                               string
	Expect                             kinds
	Tensors, Files                     map[string]string
}

// kinds is a string, or a list of strings of which any one is right.
type kinds []string

func (k *kinds) UnmarshalJSON(b []byte) error {
	if b[0] == '"' {
		b = []byte("[" + string(b) + "]")
	}
	return json.Unmarshal(b, (*[]string)(k))
}

func (k kinds) has(kind string) bool { return strings.Contains(fmt.Sprint(k), kind) }

func readManifest(dir string) ([]vector, error) {
	b, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if err != nil {
		return nil, err
	}
	var m struct{ Vectors []vector }
	err = json.Unmarshal(b, &m)
	return m.Vectors, err
}

// read returns the container of a vector, after decompression.
func (v *vector) read(dir string) ([]byte, error) {
	b, err := unpack(dir, v.File)
	if err == nil && sum(b) != v.Sha256 {
		err = fmt.Errorf("SHA-256 of the vector is wrong")
	}
	return b, err
}

func unpack(dir, file string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(file)))
	if err == nil && strings.HasSuffix(file, ".gz") {
		var z io.Reader
		if z, err = gzip.NewReader(bytes.NewReader(b)); err == nil {
			b, err = io.ReadAll(z)
		}
	}
	return b, err
}

// base returns the base model that a reader of the vector is given, if any.
func (v *vector) base(dir string) (*df11.Container, error) {
	if v.Base == "" {
		return nil, nil
	}
	b, err := unpack(dir, v.Base)
	if err != nil {
		return nil, err
	}
	return df11.Open(b)
}

func sum(b []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func runVectors(dir string) int {
	vectors, err := readManifest(dir)
	if err != nil {
		return fail(err)
	}
	failed := 0
	for i := range vectors {
		if err := vectors[i].run(dir); err != nil {
			failed++
			fmt.Printf("%s (%s): %v\n", vectors[i].File, vectors[i].About, err)
		}
	}
	fmt.Printf("%d passed, %d failed\n", len(vectors)-failed, failed)
	if failed > 0 {
		return 1
	}
	return 0
}

// run checks that the vector is what its row says. What is invalid may be found
// at an earlier level.
func (v *vector) run(dir string) error {
	b, err := v.read(dir)
	if err != nil {
		return err
	}
	base, err := v.base(dir)
	if err != nil {
		return err
	}
	if v.Expect.has("valid") {
		return v.runValid(b, base)
	}
	level, err := problem(b, base)
	wanted := map[string]int{"open": 0, "load": 1, "verify": 2}[v.Level]
	if err == nil || !v.Expect.has(df11.KindOf(err).String()) || level > wanted {
		return fmt.Errorf("wanted %s at %s, found at level %d: %v", v.Expect, v.Level, level, err)
	}
	return nil
}

// problem returns the first problem of a container, and its level: 0 for open,
// 1 for load, 2 for verify.
func problem(b []byte, base *df11.Container) (int, error) {
	c, err := df11.Open(b)
	if err != nil {
		return 0, err
	}
	c.Base = base
	for i := range c.Tensors {
		_, err := c.Load(&c.Tensors[i])
		if err != nil && df11.KindOf(err) != df11.Unsupported {
			return 1, err
		}
	}
	m, err := df11.NewModel("", c)
	if err != nil {
		return 2, err
	}
	if r := m.Verify(); len(r.Wrong) > 0 {
		return 2, r.Wrong[0]
	}
	return 2, nil
}

func (v *vector) runValid(b []byte, base *df11.Container) error {
	c, err := df11.Open(b)
	if err != nil {
		return err
	}
	c.Base = base
	found, files := map[string]string{}, map[string]string{}
	for i := range c.Tensors {
		t := &c.Tensors[i]
		if err := record(found, c.Text(t.Name))(c.Load(t)); err != nil {
			return err
		}
	}
	for i, f := range c.Files {
		if err := record(files, c.Text(f.Path))(c.Content(i)); err != nil {
			return err
		}
	}
	if fmt.Sprint(found, files) != fmt.Sprint(v.Tensors, v.Files) {
		return fmt.Errorf("tensors and files are %v %v", found, files)
	}
	m, err := df11.NewModel("", c)
	if err != nil {
		return err
	}
	r, want := m.Verify(), map[string]int{"good": 0, "incomplete": 2}[v.Result]
	if r.Exit() != want {
		return fmt.Errorf("verification: exit %d and not %d: %v", r.Exit(), want, r.Wrong)
	}
	return nil
}

// record notes the hash of what is found under a name, except what is
// Unsupported.
func record(found map[string]string, name string) func([]byte, error) error {
	return func(b []byte, err error) error {
		if df11.KindOf(err) == df11.Unsupported {
			return nil
		}
		found[name] = sum(b)
		return err
	}
}
