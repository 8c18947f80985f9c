package main

import (
	"encoding/binary"
	"flag"
	"hash/crc32"
	"math/rand"
	"testing"
	"time"

	"df11go/df11"
)

const vectorsDir = "../../vectors"

var (
	mutate = flag.Duration("mutate", 2*time.Second, "how long to flip random bytes")
	seed   = flag.Int64("seed", 0, "of random bytes; 0 takes the time")
)

func load(t *testing.T, name string) []byte {
	t.Helper()
	for _, v := range manifest(t) {
		if v.File == name {
			return bytesOf(t, v)
		}
	}
	t.Fatalf("no vector %s", name)
	return nil
}

func manifest(t *testing.T) []vector {
	t.Helper()
	all, err := readManifest(vectorsDir)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func bytesOf(t *testing.T, v vector) []byte {
	t.Helper()
	b, err := v.read(vectorsDir)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestVectors(t *testing.T) {
	for _, v := range manifest(t) {
		if err := v.run(vectorsDir); err != nil {
			t.Errorf("%s: %v", v.File, err)
		}
	}
}

// A container cut at any byte is Corrupt when it is opened.
func TestTruncation(t *testing.T) {
	b := load(t, "valid/smallest.df11.gz")
	for n := range b {
		level, err := problem(b[:n])
		if level != 0 || df11.KindOf(err) != df11.Corrupt {
			t.Fatalf("cut at %d: level %d, %v", n, level, err)
		}
	}
}

// Each flipped bit is found, whatever byte it is in.
func TestFlips(t *testing.T) {
	for _, name := range []string{"smallest", "tile-one-pair", "no-files"} {
		b := load(t, "valid/"+name+".df11.gz")
		for i := range b {
			b[i] ^= 1 << (i % 8)
			if _, err := problem(b); err == nil {
				t.Errorf("%s: a flip at %d was not found", name, i)
			}
			b[i] ^= 1 << (i % 8)
		}
	}
}

// A flip under right checksums may be valid; it never panics.
func TestFlipsUnderChecksums(t *testing.T) {
	for _, name := range []string{"smallest", "one-weight", "tile-one-pair", "aliases"} {
		b := load(t, "valid/"+name+".df11.gz")
		directory := int(binary.LittleEndian.Uint64(b[40:]))
		for i := range b {
			if b[i] == 0 && i < directory {
				continue
			}
			m := append([]byte(nil), b...)
			m[i] ^= 1 << (i % 8)
			sign(m)
			_, _ = problem(m)
		}
	}
}

// Random flips in all valid vectors, half of them under right checksums.
func TestMutate(t *testing.T) {
	if *seed == 0 {
		*seed = time.Now().UnixNano()
	}
	t.Logf("seed %d", *seed)
	random := rand.New(rand.NewSource(*seed))
	var valid [][]byte
	for _, v := range manifest(t) {
		if v.Expect.has("valid") {
			valid = append(valid, bytesOf(t, v))
		}
	}
	rounds, found := 0, 0
	for end := time.Now().Add(*mutate); time.Now().Before(end); rounds++ {
		b := append([]byte(nil), valid[rounds%len(valid)]...)
		flip(random, b)
		if rounds%8 != 0 {
			sign(b)
		}
		if _, err := problem(b); err != nil {
			found++
		}
	}
	t.Logf("%d containers, %d of them wrong", rounds, found)
}

// flip changes some bytes, most of them where they are not zero, and more in
// the directory than elsewhere.
func flip(random *rand.Rand, b []byte) {
	directory := int(binary.LittleEndian.Uint64(b[40:]))
	values := []byte{0, 1, 2, 7, 8, 0x7F, 0x80, 0xFE, 0xFF}
	for n := 1 + random.Intn(4); n > 0; n-- {
		at := random.Intn(len(b))
		if random.Intn(2) == 0 {
			at = directory + random.Intn(len(b)-directory)
		}
		for tries := 0; b[at] == 0 && tries < 8; tries++ {
			at = at/2 + random.Intn(len(b)-at/2)
		}
		if random.Intn(2) == 0 {
			b[at] = values[random.Intn(len(values))]
		} else {
			b[at] ^= byte(1 + random.Intn(255))
		}
	}
}

// sign makes checksums right, as far as their places can be found.
func sign(b []byte) {
	le := binary.LittleEndian
	begin, length := le.Uint64(b[40:]), le.Uint64(b[48:])
	if begin < uint64(len(b)) && length <= uint64(len(b))-begin {
		signChunks(b, b[begin:begin+length])
		le.PutUint32(b[56:], crc32.ChecksumIEEE(b[begin:begin+length]))
	}
	le.PutUint32(b[60:], crc32.ChecksumIEEE(b[:60]))
	copy(b[len(b)-64:], b[:64])
}

func signChunks(b, d []byte) {
	var lists [6][]byte // files to checksums
	at := 48
	for i, size := range [...]int{80, 16, 32, 200, 24, 4} {
		if at+8 > len(d) {
			return
		}
		n := binary.LittleEndian.Uint64(d[at:])
		at += 8
		if n > uint64((len(d)-at)/size) {
			return
		}
		lists[i] = d[at : at+int(n)*size]
		at += int(n) * size
	}
	sums := lists[5]
	for s := lists[2]; len(s) > 0; s = s[32:] {
		offset, length := binary.LittleEndian.Uint64(s[16:]), binary.LittleEndian.Uint64(s[24:])
		sums = signSection(b, sums, offset, length)
	}
}

func signSection(b, sums []byte, offset, length uint64) []byte {
	if offset > uint64(len(b)) || length > uint64(len(b))-offset {
		return nil
	}
	for section := b[offset : offset+length]; len(section) > 0 && len(sums) > 0; {
		n := 1 << 20
		if n > len(section) {
			n = len(section)
		}
		binary.LittleEndian.PutUint32(sums, crc32.ChecksumIEEE(section[:n]))
		section, sums = section[n:], sums[4:]
	}
	return sums
}
