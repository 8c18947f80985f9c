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
	File, Sha256, Level, About string
	Expect                     kinds
	Tensors, Files             map[string]string
}

// kinds is a string, or a list of strings of which any one is right.
type kinds []string

func (k *kinds) UnmarshalJSON(b []byte) error {
	if b[0] == '"' {
		b = []byte("[" + string(b) + "]")
	}
	return json.Unmarshal(b, (*[]string)(k))
}

func (k kinds) has(kind string) bool {
	for _, s := range k {
		if s == kind {
			return true
		}
	}
	return false
}

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
	b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(v.File)))
	if err == nil && strings.HasSuffix(v.File, ".gz") {
		var z io.Reader
		if z, err = gzip.NewReader(bytes.NewReader(b)); err == nil {
			b, err = io.ReadAll(z)
		}
	}
	if err == nil && sum(b) != v.Sha256 {
		err = fmt.Errorf("SHA-256 of the vector is wrong")
	}
	return b, err
}

func sum(b []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func runVectors(args []string, _ string, out io.Writer) int {
	vectors, err := readManifest(args[0])
	if err != nil {
		return fail(out, err)
	}
	failed := 0
	for i := range vectors {
		if err := vectors[i].run(args[0]); err != nil {
			failed++
			fmt.Fprintf(out, "%s (%s): %v\n", vectors[i].File, vectors[i].About, err)
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed\n", len(vectors)-failed, failed)
	if failed > 0 {
		return 1
	}
	return 0
}

func (v *vector) run(dir string) error {
	b, err := v.read(dir)
	if err != nil {
		return err
	}
	if v.Expect.has("valid") {
		return v.runValid(b)
	}
	return v.runInvalid(b)
}

// runInvalid checks that the right problem is found at the level at the
// latest.
func (v *vector) runInvalid(b []byte) error {
	level, err := problem(b)
	if err == nil {
		return fmt.Errorf("nothing was found")
	}
	wanted := map[string]int{"open": 0, "load": 1, "verify": 2}[v.Level]
	if !v.Expect.has(df11.KindOf(err).String()) || level > wanted {
		return fmt.Errorf("wanted %s at %s, found at level %d: %w", v.Expect, v.Level, level, err)
	}
	return nil
}

// problem returns the first problem of a container, and its level: 0 for open,
// 1 for load, 2 for verify.
func problem(b []byte) (int, error) {
	c, err := df11.Open(bytes.NewReader(b), uint64(len(b)))
	if err != nil {
		return 0, err
	}
	for i := range c.Tensors {
		err := c.Load(&c.Tensors[i], io.Discard)
		if err != nil && df11.KindOf(err) != df11.Unsupported {
			return 1, err
		}
	}
	m, err := df11.NewModel("", c)
	if err != nil {
		return 2, err
	}
	r := m.Verify()
	if len(r.Wrong) > 0 {
		return 2, r.Wrong[0]
	}
	return 2, r.Broken
}

func (v *vector) runValid(b []byte) error {
	c, err := df11.Open(bytes.NewReader(b), uint64(len(b)))
	if err != nil {
		return err
	}
	err = checkAll(len(c.Tensors), v.Tensors, func(i int, out io.Writer) (string, error) {
		return c.Text(c.Tensors[i].Name), c.Load(&c.Tensors[i], out)
	})
	if err != nil {
		return err
	}
	err = checkAll(len(c.Files), v.Files, func(i int, out io.Writer) (string, error) {
		return c.Text(c.Files[i].Path), c.WriteFile(i, out)
	})
	if err != nil {
		return err
	}
	m, err := df11.NewModel("", c)
	if err != nil {
		return err
	}
	r := m.Verify()
	if got, want := r.Exit(), v.wantedExit(c); got != want {
		return fmt.Errorf("verification: exit %d and not %d: %v %v", got, want, r.Wrong, r.Broken)
	}
	return nil
}

// checkAll compares what write gives by name with wanted hashes; all others
// are Unsupported.
func checkAll(count int, wanted map[string]string,
	write func(int, io.Writer) (string, error)) error {
	found := 0
	for i := 0; i < count; i++ {
		var out bytes.Buffer
		name, err := write(i, &out)
		want, ok := wanted[name]
		if !ok && df11.KindOf(err) == df11.Unsupported {
			continue
		}
		if err != nil {
			return err
		}
		if sum(out.Bytes()) != want {
			return fmt.Errorf("%q is wrong", name)
		}
		found++
	}
	if found != len(wanted) {
		return fmt.Errorf("%d tensors or files and not %d", found, len(wanted))
	}
	return nil
}

// wantedExit is 2 where something of one container cannot be checked (9).
func (v *vector) wantedExit(c *df11.Container) int {
	if c.ShardCount > 1 || len(v.Tensors) < len(c.Tensors) || len(v.Files) < len(c.Files) {
		return 2
	}
	return 0
}
