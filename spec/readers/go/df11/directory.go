package df11

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// Hash is a BLAKE3 hash (1).
type Hash [32]byte

// Directory is the record of section 3, whose lists hold records as the file
// has them.
type Directory struct {
	Shard
	Files     []File
	Blocks    []Block
	Sections  []Section
	Tensors   []Tensor
	Arrays    []Array
	Checksums []uint32
	Metadata  []Metadata
	text      []byte

	firstChecksum []uint64 // of each section
}

// Shard says which part of which model a container holds.
type Shard struct {
	ShardIndex, ShardCount uint64
	Identity               Hash
}

// Text is the place of a path, name, key or value in the text.
type Text struct{ Offset, Length uint64 }

// Owner says which arrays a file or tensor has.
type Owner struct{ FirstArray, ArrayCount uint64 }

// File is an original file of the model.
type File struct {
	Kind, Reserved uint32
	Path           Text
	Length         uint64
	Hash           Hash
	Owner
}

// Block is a group of tensors that a model uses together.
type Block struct{ Name Text }

// Section is a run of bytes that holds the arrays of one kind of one block.
type Section struct {
	Kind, Reserved        uint32
	Block, Offset, Length uint64
}

func (s *Section) known() bool { return s.Kind >= sectionCodebook && s.Kind <= sectionSide }

// Tensor is a tensor of a weights file.
type Tensor struct {
	Name                    Text
	Dtype, Encoding         uint32
	Block, File, FileOffset uint64
	DimensionCount          uint64
	Shape                   [maxDimensions]uint64
	Owner
	Parameters [4]uint64
	Hash       Hash
}

// Array is a run of bytes inside a section.
type Array struct{ Section, Offset, Length uint64 }

// Metadata is a key and its value.
type Metadata struct{ Key, Value Text }

// list reads a count and as many records, after it has checked that they
// remain.
func list[T any](r *bytes.Reader) []T {
	var n uint64
	Corrupt.when(r.Len() < 8, "the directory ends early")
	check(binary.Read(r, binary.LittleEndian, &n))
	size := binary.Size(*new(T))
	Corrupt.when(n > uint64(r.Len()/size), "a list does not fit into the directory")
	out := make([]T, n)
	check(binary.Read(r, binary.LittleEndian, out))
	return out
}

// parseDirectory takes step 9 of section 9.
func parseDirectory(b []byte) (d Directory) {
	r := bytes.NewReader(b)
	Corrupt.when(len(b) < binary.Size(d.Shard), "the directory has %d bytes", len(b))
	check(binary.Read(r, binary.LittleEndian, &d.Shard))
	d.Files = list[File](r)
	d.Blocks = list[Block](r)
	d.Sections = list[Section](r)
	d.Tensors = list[Tensor](r)
	d.Arrays = list[Array](r)
	d.Checksums = list[uint32](r)
	d.Metadata = list[Metadata](r)
	d.text = list[byte](r)
	Corrupt.when(r.Len() != 0, "%d bytes are left over in the directory", r.Len())
	return d
}

// Text returns the string of a place, which was checked when the container
// was opened.
func (d *Directory) Text(t Text) string {
	return string(d.text[t.Offset : t.Offset+t.Length])
}

// arraysOf returns the arrays of a file or tensor, after the owners were checked.
func (d *Directory) arraysOf(o Owner) []Array {
	return d.Arrays[o.FirstArray : o.FirstArray+o.ArrayCount]
}

// Measure returns the elements and bytes of a tensor (5), 0 and 0 if the dtype
// is unknown. A dimension of zero does not undo an overflow of the others.
func (t *Tensor) Measure() (elements, size uint64) {
	all, empty := dtypes[t.Dtype].bits, !knownDtype(t.Dtype)
	for _, n := range t.Shape[:t.DimensionCount] {
		if n == 0 {
			empty = true
			continue
		}
		high, low := bits.Mul64(all, n)
		Limit.when(high != 0, "the bits of a tensor exceed 2^64 - 1")
		all = low
	}
	if empty {
		return 0, 0
	}
	Corrupt.when(all%8 != 0, "the elements of a tensor have %d bits", all)
	return all / dtypes[t.Dtype].bits, all / 8
}
