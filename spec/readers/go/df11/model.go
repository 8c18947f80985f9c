package df11

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sort"

	"df11go/blake3"
)

// Model is one container, or several shards of one model (8).
type Model struct {
	Shards []*Container
	Folder string // that holds the files of kind beside; empty if not known
}

// original is a file of a model, with its path, its container and its tensors
// in the order of (file_offset, decoded bytes).
type original struct {
	*File
	path    string
	c       *Container
	tensors []*Tensor
}

// NewModel checks that containers are shards of one model, of which a path or
// a name occurs once.
func NewModel(folder string, shards ...*Container) (*Model, error) {
	m := &Model{shards, folder}
	return m, try(func() {
		Corrupt.when(len(shards) == 0, "no containers")
		indices, names, paths := map[uint64]bool{}, map[string]bool{}, places{}
		for _, c := range shards {
			other := c.Identity != shards[0].Identity || c.ShardCount != shards[0].ShardCount
			Corrupt.when(other, "two containers are of different models")
			Corrupt.when(indices[c.ShardIndex], "two containers are shard %d", c.ShardIndex)
			indices[c.ShardIndex] = true
			for _, t := range c.Tensors {
				name := c.Text(t.Name)
				Corrupt.when(names[name], "two shards have a tensor %q", name)
				names[name] = true
			}
		}
		for _, f := range m.files() {
			paths.add(f.path)
		}
	})
}

// files are all files of the model, in ascending order of their paths.
func (m *Model) files() (out []original) {
	for _, c := range m.Shards {
		for i := range c.Files {
			out = append(out, c.original(i))
		}
	}
	sort.Slice(out, func(i, k int) bool { return out[i].path < out[k].path })
	return out
}

func (c *Container) original(i int) original {
	f := original{&c.Files[i], c.Text(c.Files[i].Path), c, nil}
	for k := range c.Tensors {
		if c.Tensors[k].File == uint64(i) {
			f.tensors = append(f.tensors, &c.Tensors[k])
		}
	}
	sort.SliceStable(f.tensors, func(i, k int) bool {
		a, b := f.tensors[i], f.tensors[k]
		_, one := a.Measure()
		_, other := b.Measure()
		return a.FileOffset < b.FileOffset || (a.FileOffset == b.FileOffset && one < other)
	})
	return f
}

// identity computes the identity of a complete model (8, Identity).
func (m *Model) identity() Hash {
	var all []byte
	for _, f := range m.files() {
		kind := byte(0)
		if f.Kind == FileWeights {
			kind = 1
		}
		all = binary.LittleEndian.AppendUint64(append(all, kind), uint64(len(f.path)))
		all = binary.LittleEndian.AppendUint64(append(all, f.path...), f.Length)
		all = append(all, f.Hash[:]...)
	}
	return blake3.Sum256(all)
}

// Report is the result of verification or restoring (9).
type Report struct {
	Wrong     []error  // what was checked and is wrong
	Unchecked []string // what could not be checked
	Broken    error    // a failure of the storage
}

// Exit is the exit code of the command. The text has none for a failure of
// the storage; 3 is a choice of this program.
func (r *Report) Exit() int {
	switch {
	case r.Broken != nil:
		return 3
	case len(r.Wrong) > 0:
		return 1
	case len(r.Unchecked) > 0:
		return 2
	}
	return 0
}

// try records the result of a check and tells whether it was good.
func (r *Report) try(f func()) bool {
	err := try(f)
	switch KindOf(err) {
	case Corrupt, Limit:
		r.Wrong = append(r.Wrong, err)
	case Unsupported:
		r.skip("%s", err)
	default:
		if err != nil {
			r.Broken = err
		}
	}
	return err == nil
}

func (r *Report) skip(format string, args ...any) {
	r.Unchecked = append(r.Unchecked, fmt.Sprintf(format, args...))
}

// Verify checks all that it can (9).
func (m *Model) Verify() *Report {
	r := &Report{}
	for _, c := range m.Shards {
		for i, s := range c.Sections {
			for chunk := uint64(0); chunk < ceilDiv(s.Length, chunkBytes); chunk++ {
				r.try(func() { c.checkChunk(uint64(i), chunk) })
			}
		}
		r.try(c.checkZeros)
	}
	for _, f := range m.files() {
		switch f.Kind {
		case FileWeights:
			f.verifyWeights(r)
		case FileSide:
			r.try(func() { f.content() })
		case FileBeside:
			r.try(func() { m.findBeside(f) })
		}
	}
	if there, all := len(m.Shards), m.Shards[0].ShardCount; uint64(there) < all {
		r.skip("the identity: %d of %d shards are there", there, all)
	} else {
		r.try(func() { Corrupt.when(m.identity() != m.Shards[0].Identity, "the identity is wrong") })
	}
	return r
}

// checkZeros checks the zeros between arrays and between sections (2, 3).
func (c *Container) checkZeros() {
	zeros := func(begin, end uint64) {
		Corrupt.when(!allZero(c.bytes[begin:end]), "a byte from %d to %d is not zero", begin, end)
	}
	ends := make([]uint64, len(c.Sections)) // of the last array so far
	for _, a := range c.Arrays {
		at := c.Sections[a.Section].Offset
		zeros(at+ends[a.Section], at+a.Offset)
		ends[a.Section] = a.Offset + a.Length
	}
	for _, s := range c.Sections {
		end := s.Offset + s.Length
		zeros(end, align(end, sectionAlignment))
	}
}

// verifyWeights checks the header of a weights file, its tensors and its hash.
// The hash of an alias is that of its target (6.1).
func (f original) verifyWeights(r *Report) {
	var content [][]byte
	good := r.try(func() {
		content = f.c.stored(f.Owner)
		f.c.checkPrefix(content[0], f.File, f.tensors)
	})
	for _, t := range f.tensors {
		good = r.try(func() {
			b := f.c.decode(t)
			wrong := blake3.Sum256(b) != t.Hash
			Corrupt.when(wrong, "the hash of tensor %q is wrong", f.c.Text(t.Name))
			content = append(content, b)
		}) && good
	}
	if good {
		r.try(func() { f.checkHash(bytes.Join(content, nil)) })
	} else {
		r.skip("the hash of file %q", f.path)
	}
}

func (f original) checkHash(b []byte) []byte {
	Corrupt.when(blake3.Sum256(b) != f.Hash, "the hash of file %q is wrong", f.path)
	return b
}

// checkCover checks by the directory alone that the tensors of a weights file
// can be decoded, and cover it (7).
func (f original) checkCover() {
	Unsupported.when(f.Kind == FileBeside, "file %q lies beside the container", f.path)
	if f.Kind == FileSide {
		return
	}
	at := f.c.arraysOf(f.Owner)[0].Length
	for _, t := range f.tensors {
		Unsupported.when(!f.c.Supported(t), "tensor %q of file %q", f.c.Text(t.Name), f.path)
		Corrupt.when(t.FileOffset != at, "a tensor of %q starts at %d", f.path, t.FileOffset)
		_, size := t.Measure()
		at += size
	}
	Corrupt.when(at != f.Length, "the tensors of %q end at %d and not at %d", f.path, at, f.Length)
}

// content returns the original file, of kind weights or side.
func (f original) content() []byte {
	f.checkCover()
	parts := f.c.stored(f.Owner)
	for _, t := range f.tensors {
		parts = append(parts, f.c.decode(t))
	}
	return f.checkHash(bytes.Join(parts, nil))
}

// Content returns the original file of an index.
func (c *Container) Content(i int) (b []byte, err error) {
	err = try(func() { b = c.original(i).content() })
	return b, err
}
