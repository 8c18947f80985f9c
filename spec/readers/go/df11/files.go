package df11

import (
	"io"
	"sort"

	"df11go/blake3"
)

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
			return list[i].Size < list[k].Size
		})
	}
	return out
}

// checkCover checks by the directory alone that tensors of known dtypes cover
// a weights file (7).
func (c *Container) checkCover(f *File, tensors []*Tensor) error {
	at := c.Arrays[f.firstArray].Length
	for _, t := range tensors {
		if t.FileOffset != at {
			return corrupt("tensor %q starts at %d and not at %d", t.Name, t.FileOffset, at)
		}
		at += t.Size
	}
	if at != f.Length {
		return corrupt("the tensors of %q end at %d and not at %d", f.Path, at, f.Length)
	}
	return nil
}

// checkSupported refuses a file of which a tensor cannot be decoded.
func (c *Container) checkSupported(f *File, tensors []*Tensor) error {
	for _, t := range tensors {
		if !c.Supported(t) {
			return unsupported("tensor %q of file %q", t.Name, f.Path)
		}
	}
	return nil
}

// writeFile writes the original file, of kind weights or side, and compares
// its hash at the end.
func (c *Container) writeFile(f *File, tensors []*Tensor, w io.Writer) error {
	if err := c.checkSupported(f, tensors); err != nil {
		return err
	}
	h := blake3.New()
	w = io.MultiWriter(h, w)
	if f.arrayCount > 0 {
		err := c.eachPiece(c.Arrays[f.firstArray], func(b []byte) error {
			_, err := w.Write(b)
			return err
		})
		if err != nil {
			return err
		}
	}
	if f.Kind == FileWeights {
		if err := c.checkCover(f, tensors); err != nil {
			return err
		}
	}
	for _, t := range tensors {
		if err := c.decode(t, w, false); err != nil {
			return err
		}
	}
	if h.Sum() != f.Hash {
		return corrupt("the hash of file %q is wrong", f.Path)
	}
	return nil
}

// WriteFile writes the original file of an index to w. What it wrote is not
// the original if it returns an error.
func (c *Container) WriteFile(i int, w io.Writer) error {
	f := &c.Files[i]
	if f.Kind == FileBeside {
		return unsupported("file %q lies beside the container", f.Path)
	}
	return c.writeFile(f, c.tensorsByFile()[i], w)
}
