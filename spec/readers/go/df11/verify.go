package df11

import (
	"io"

	"df11go/blake3"
)

// verify checks a container at the level verify of section 9, less what needs
// the other shards or the folder.
func (c *Container) verify(r *Report) {
	c.verifyChunks(r)
	r.add(c.checkGaps())
	byFile := c.tensorsByFile()
	for i := range c.Files {
		if r.Broken != nil {
			return
		}
		switch f := &c.Files[i]; f.Kind {
		case FileWeights:
			c.verifyWeights(r, f, byFile[i])
		case FileSide:
			r.add(c.writeFile(f, nil, io.Discard))
		}
	}
}

func (c *Container) verifyChunks(r *Report) {
	for i := range c.Sections {
		n := ceilDiv(c.Sections[i].Length, chunkBytes)
		for chunk := uint64(0); chunk < n && r.Broken == nil; chunk++ {
			r.add(c.checkChunk(uint64(i), chunk))
		}
	}
}

// checkGaps checks the zeros between arrays and between sections (2, 3).
func (c *Container) checkGaps() error {
	ends := make([]uint64, len(c.Sections)) // of the last array so far
	for _, a := range c.Arrays {
		at := c.Sections[a.Section].Offset
		if err := c.checkZeros(at+ends[a.Section], at+a.Offset); err != nil {
			return err
		}
		ends[a.Section] = a.Offset + a.Length
	}
	for i := range c.Sections {
		next := c.DirectoryOffset
		if i+1 < len(c.Sections) {
			next = c.Sections[i+1].Offset
		}
		if err := c.checkZeros(c.Sections[i].end(), next); err != nil {
			return err
		}
	}
	return nil
}

// checkZeros reads fewer bytes than an alignment.
func (c *Container) checkZeros(begin, end uint64) error {
	if begin == end {
		return nil
	}
	b, err := readAt(c.r, begin, end-begin)
	if err == nil && !allZero(b) {
		err = corrupt("a byte from %d to %d is not zero", begin, end)
	}
	return err
}

// verifyWeights checks the header of a weights file, its tensors and its hash.
func (c *Container) verifyWeights(r *Report, f *File, tensors []*Tensor) {
	h := blake3.New()
	good := true
	a := c.Arrays[f.firstArray]
	prefix, err := c.readArray(a, 0, a.Length)
	if err == nil {
		_, _ = h.Write(prefix)
		err = checkPrefix(prefix, f, tensors)
	}
	good = r.add(err) && good
	prefix = nil
	for _, t := range tensors {
		good = r.add(c.verifyTensor(t, h)) && good
	}
	if !good {
		r.skip("the hash of file %q", f.Path)
		return
	}
	if h.Sum() != f.Hash {
		r.add(corrupt("the hash of file %q is wrong", f.Path))
	}
}

// verifyTensor decodes a tensor, compares its hash and adds its bytes to the
// hash of its file. The hash of an alias is checked through its target (9).
func (c *Container) verifyTensor(t *Tensor, file io.Writer) error {
	own := blake3.New()
	w := io.MultiWriter(own, file)
	if t.Encoding == encodingAlias {
		w = file
	}
	if err := c.decode(t, w, true); err != nil {
		return err
	}
	if t.Encoding != encodingAlias && own.Sum() != t.Hash {
		return corrupt("the hash of tensor %q is wrong", t.Name)
	}
	return nil
}
