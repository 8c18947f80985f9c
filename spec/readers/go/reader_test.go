// What the vectors do not show; `go run . vectors ../../vectors` runs those.
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
	c, err := df11.Open(bytes.NewReader(b), uint64(len(b)))
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
			var want bytes.Buffer
			path := c.Text(f.Path)
			if c.WriteFile(i, &want) != nil {
				continue
			}
			restored++
			if len(path) > 4000 {
				continue // longer than what one call of the system takes
			}
			b, err := os.ReadFile(filepath.Join(out, path))
			if err != nil || !bytes.Equal(b, want.Bytes()) {
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
		level, err := problem(b[:n])
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
		directory := int(binary.LittleEndian.Uint64(b[40:]))
		for i := range b {
			if b[i] == 0 && i < directory && i%61 != 0 {
				continue
			}
			b[i] ^= 1 << (i % 8)
			if _, err := problem(b); err == nil {
				t.Errorf("%s: a flip at %d was not found", name, i)
			}
			signed := append([]byte(nil), b...)
			sign(signed)
			_, _ = problem(signed)
			b[i] ^= 1 << (i % 8)
		}
	}
}

// No bytes make the reader panic, under right checksums.
func FuzzProblem(f *testing.F) {
	for _, b := range valid(f) {
		f.Add(b)
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		if len(b) >= 64 {
			b = append([]byte(nil), b...)
			sign(b)
		}
		_, _ = problem(b)
	})
}

// sign makes checksums right, as far as their places can be found.
func sign(b []byte) {
	le := binary.LittleEndian
	begin, length := le.Uint64(b[40:]), le.Uint64(b[48:])
	if directory := part(b, begin, length); directory != nil {
		signChunks(b, directory)
		le.PutUint32(b[56:], crc32.ChecksumIEEE(directory))
	}
	le.PutUint32(b[60:], crc32.ChecksumIEEE(b[:60]))
	copy(b[len(b)-64:], b[:64])
}

// part returns bytes of b, or nil if it has no such ones.
func part(b []byte, offset, length uint64) []byte {
	if offset > uint64(len(b)) || length > uint64(len(b))-offset {
		return nil
	}
	return b[offset : offset+length]
}

func signChunks(b, d []byte) {
	var lists [6][]byte // files to checksums
	at := uint64(48)
	for i, size := range [...]uint64{80, 16, 32, 200, 24, 4} {
		count := part(d, at, 8)
		if count == nil || binary.LittleEndian.Uint64(count) > uint64(len(d))/size {
			return
		}
		lists[i] = part(d, at+8, size*binary.LittleEndian.Uint64(count))
		at += 8 + uint64(len(lists[i]))
	}
	sums := lists[5]
	for s := lists[2]; len(s) > 0; s = s[32:] {
		offset, length := binary.LittleEndian.Uint64(s[16:]), binary.LittleEndian.Uint64(s[24:])
		for chunk := part(b, offset, length); len(chunk) > 0 && len(sums) > 0; sums = sums[4:] {
			n := len(chunk)
			if n > 1<<20 {
				n = 1 << 20
			}
			binary.LittleEndian.PutUint32(sums, crc32.ChecksumIEEE(chunk[:n]))
			chunk = chunk[n:]
		}
	}
}
