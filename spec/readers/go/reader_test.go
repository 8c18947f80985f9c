// Cases beyond the vectors, which `go run . vectors ../../vectors` runs.
package main

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"testing"

	"df11go/df11"
)

const vectorsDir = "../../vectors"

// valid returns the bytes of all valid vectors by name.
func valid(t testing.TB) map[string][]byte {
	all, err := readManifest(vectorsDir)
	out := map[string][]byte{}
	for _, v := range all {
		if v.Expect.has("valid") && err == nil {
			name := v.File[len("valid/") : len(v.File)-len(".df11.gz")]
			out[name], err = v.read(vectorsDir)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func open(t *testing.T, b []byte) *df11.Container {
	c, err := df11.Open(b)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Shards make a model in any order; one twice, or one of another model, does
// not (8).
func TestShards(t *testing.T) {
	v := valid(t)
	first, second := open(t, v["shard-1-of-2"]), open(t, v["shard-2-of-2"])
	m, err := df11.NewModel("", second, first)
	if err != nil {
		t.Fatal(err)
	}
	if r := m.Verify(); r.Exit() != 0 {
		t.Errorf("verification: %v %v", r.Wrong, r.Unchecked)
	}
	if _, err := df11.NewModel("", first, first); err == nil {
		t.Error("one shard twice")
	}
	if _, err := df11.NewModel("", second, open(t, v["smallest"])); err == nil {
		t.Error("shards of two models")
	}
}

// Every valid vector is restored into a folder, and never a second time.
func TestRestore(t *testing.T) {
	for name, b := range valid(t) {
		c := open(t, b)
		m, err := df11.NewModel("", c)
		if err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		r := m.Restore(out)
		if r.Broken != nil || len(r.Wrong) > 0 {
			t.Errorf("%s: %v %v", name, r.Broken, r.Wrong)
		}
		restored := 0
		for i, f := range c.Files {
			path := c.Text(f.Path)
			want, err := c.Content(i)
			if err != nil {
				continue
			}
			restored++
			if len(path) > 4000 {
				continue // longer than what one call of the system takes
			}
			b, err := os.ReadFile(filepath.Join(out, path))
			if err != nil || !bytes.Equal(b, want) {
				t.Errorf("%s: %s: %v", name, path, err)
			}
		}
		if r := m.Restore(out); restored > 0 && r.Broken == nil {
			t.Errorf("%s was restored over itself", name)
		}
	}
}

// A container cut at any byte is Corrupt when it is opened.
func TestTruncation(t *testing.T) {
	b := valid(t)["smallest"]
	for n := range b {
		level, err := problem(b[:n], nil)
		if level != 0 || df11.KindOf(err) != df11.Corrupt {
			t.Fatalf("cut at %d: level %d, %v", n, level, err)
		}
	}
}

// Each flipped bit is found, whatever byte it is in (of zeros before the
// directory, some are flipped). Under right checksums it may be valid; it never
// panics.
func TestFlips(t *testing.T) {
	v := valid(t)
	for _, name := range []string{"smallest", "one-weight", "tile-one-pair", "aliases", "no-files"} {
		b := v[name]
		c := open(t, append([]byte(nil), b...))
		for i := range b {
			if b[i] == 0 && i < int(c.DirectoryOffset) && i%61 != 0 {
				continue
			}
			b[i] ^= 1 << (i % 8)
			if _, err := problem(b, nil); err == nil {
				t.Errorf("%s: a flip at %d was not found", name, i)
			}
			signed := append([]byte(nil), b...)
			sign(signed, c)
			_, _ = problem(signed, nil)
			b[i] ^= 1 << (i % 8)
		}
	}
}

// No changed bytes of a valid vector make the reader panic, under right
// checksums: three bytes of changes say where, the fourth what.
func FuzzProblem(f *testing.F) {
	v := valid(f)
	for name := range v {
		f.Add(name, []byte{0, 0, 0, 0})
	}
	f.Fuzz(func(t *testing.T, name string, changes []byte) {
		b := append([]byte(nil), v[name]...)
		for ; len(b) > 0 && len(changes) >= 4; changes = changes[4:] {
			word := binary.LittleEndian.Uint32(changes)
			b[int(word>>8)%len(b)] ^= byte(word)
		}
		if len(b) > 0 {
			sign(b, open(t, v[name]))
		}
		_, _ = problem(b, nil)
	})
}

// sign makes checksums right, in the places of a valid container.
func sign(b []byte, c *df11.Container) {
	le, crc := binary.LittleEndian, crc32.ChecksumIEEE
	directory := b[c.DirectoryOffset:][:c.DirectoryLen]
	sums := directory[48+6*8+80*len(c.Files)+16*len(c.Blocks)+32*len(c.Sections):]
	sums = sums[200*len(c.Tensors)+24*len(c.Arrays):]
	for _, s := range c.Sections {
		for section := b[s.Offset:][:s.Length]; len(section) > 0; sums = sums[4:] {
			chunk := section
			if len(chunk) > 1<<20 {
				chunk = chunk[:1<<20]
			}
			le.PutUint32(sums, crc(chunk))
			section = section[len(chunk):]
		}
	}
	le.PutUint32(b[56:], crc(directory))
	le.PutUint32(b[60:], crc(b[:60]))
	copy(b[len(b)-64:], b[:64])
}
