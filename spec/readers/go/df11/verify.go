package df11

import (
	"fmt"
	"io"
	"sort"

	"df11go/blake3"
)

// Report is the result of verification (9).
type Report struct {
	Wrong     []error  // what was checked and is wrong
	Unchecked []string // what could not be checked
	Broken    error    // a failure of the storage, which ended verification
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
		if err != nil && r.Broken == nil {
			r.Broken = err
		}
	}
	return err == nil
}

func (r *Report) skip(format string, args ...any) {
	r.Unchecked = append(r.Unchecked, fmt.Sprintf(format, args...))
}

// verify checks a container at the level verify of section 9, less what needs
// the other shards or the folder.
func (c *Container) verify(r *Report) {
	for i := range c.Sections {
		n := ceilDiv(c.Sections[i].Length, chunkBytes)
		for chunk := uint64(0); chunk < n && r.Broken == nil; chunk++ {
			r.try(func() { c.checkChunk(uint64(i), chunk) })
		}
	}
	r.try(c.checkGaps)
	byFile := c.tensorsByFile()
	for i := range c.Files {
		if r.Broken != nil {
			return
		}
		switch f := &c.Files[i]; f.Kind {
		case FileWeights:
			c.verifyWeights(r, f, byFile[i])
		case FileSide:
			r.try(func() { c.writeFile(f, nil, io.Discard) })
		}
	}
}

// checkGaps checks the zeros between arrays and between sections (2, 3).
func (c *Container) checkGaps() {
	ends := make([]uint64, len(c.Sections)) // of the last array so far
	for _, a := range c.Arrays {
		at := c.Sections[a.Section].Offset
		c.checkZeros(at+ends[a.Section], at+a.Offset)
		ends[a.Section] = a.Offset + a.Length
	}
	for i := range c.Sections {
		next := c.DirectoryOffset
		if i+1 < len(c.Sections) {
			next = c.Sections[i+1].Offset
		}
		c.checkZeros(c.Sections[i].end(), next)
	}
}

// checkZeros reads fewer bytes than an alignment.
func (c *Container) checkZeros(begin, end uint64) {
	zero := allZero(c.readAt(begin, end-begin))
	Corrupt.when(!zero, "a byte from %d to %d is not zero", begin, end)
}

// verifyWeights checks the header of a weights file, its tensors and its hash.
func (c *Container) verifyWeights(r *Report, f *File, tensors []*Tensor) {
	h := blake3.New()
	good := r.try(func() {
		a := c.arraysOfFile(f)[0]
		prefix := c.read(a, 0, a.Length)
		_, _ = h.Write(prefix)
		c.checkPrefix(prefix, f, tensors)
	})
	for _, t := range tensors {
		good = r.try(func() { c.verifyTensor(t, h) }) && good
	}
	if !good {
		r.skip("the hash of file %q", c.Text(f.Path))
		return
	}
	r.try(func() { c.checkHash(f, h) })
}

func (c *Container) checkHash(f *File, h *blake3.Hasher) {
	Corrupt.when(h.Sum() != f.Hash, "the hash of file %q is wrong", c.Text(f.Path))
}

// verifyTensor decodes a tensor, compares its hash and adds its bytes to the
// hash of its file. The hash of an alias is that of its target (6.1).
func (c *Container) verifyTensor(t *Tensor, file io.Writer) {
	own := blake3.New()
	c.decode(t, io.MultiWriter(own, file), true)
	Corrupt.when(own.Sum() != t.Hash, "the hash of tensor %q is wrong", c.Text(t.Name))
}

// tensorsByFile returns the tensors of each file in the order of (file_offset,
// decoded bytes).
func (c *Container) tensorsByFile() [][]*Tensor {
	out := make([][]*Tensor, len(c.Files))
	for i := range c.Tensors {
		t := &c.Tensors[i]
		out[t.File] = append(out[t.File], t)
	}
	for _, list := range out {
		sort.SliceStable(list, func(i, k int) bool {
			if list[i].FileOffset != list[k].FileOffset {
				return list[i].FileOffset < list[k].FileOffset
			}
			_, one := list[i].Measure()
			_, other := list[k].Measure()
			return one < other
		})
	}
	return out
}

// checkCover checks by the directory alone that the tensors of a weights file
// can be decoded, and cover it (7).
func (c *Container) checkCover(f *File, tensors []*Tensor) {
	path := c.Text(f.Path)
	for _, t := range tensors {
		Unsupported.when(!c.Supported(t), "tensor %q of file %q", c.Text(t.Name), path)
	}
	if f.Kind != FileWeights {
		return
	}
	at := c.arraysOfFile(f)[0].Length
	for _, t := range tensors {
		wrong := t.FileOffset != at
		Corrupt.when(wrong, "tensor %q starts at %d and not at %d", c.Text(t.Name), t.FileOffset, at)
		_, size := t.Measure()
		at += size
	}
	Corrupt.when(at != f.Length, "the tensors of %q end at %d and not at %d", path, at, f.Length)
}

// writeFile writes the original file, of kind weights or side, and compares
// its hash at the end.
func (c *Container) writeFile(f *File, tensors []*Tensor, w io.Writer) {
	c.checkCover(f, tensors)
	h := blake3.New()
	w = io.MultiWriter(h, w)
	c.copyArrays(c.arraysOfFile(f), w)
	for _, t := range tensors {
		c.decode(t, w, false)
	}
	c.checkHash(f, h)
}

// WriteFile writes the original file of an index to w. What it wrote is not
// the original if it returns an error.
func (c *Container) WriteFile(i int, w io.Writer) error {
	f := &c.Files[i]
	return try(func() {
		Unsupported.when(f.Kind == FileBeside, "file %q lies beside the container", c.Text(f.Path))
		c.writeFile(f, c.tensorsByFile()[i], w)
	})
}
