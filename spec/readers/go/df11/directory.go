package df11

import "encoding/binary"

// Hash is a BLAKE3 hash (1).
type Hash [32]byte

// Directory is the record of section 3.
type Directory struct {
	ShardIndex, ShardCount uint64
	Identity               Hash
	Files                  []File
	Blocks                 []Block
	Sections               []Section
	Tensors                []Tensor
	Arrays                 []Array
	Checksums              []uint32
	Metadata               []Metadata
	text                   string
}

// span is the place of a path, name, key or value in the text.
type span struct{ offset, length uint64 }

// File is an original file of the model.
type File struct {
	Kind       uint32
	Path       string
	Length     uint64
	Hash       Hash
	reserved   uint32
	path       span
	firstArray uint64
	arrayCount uint64
}

// Block is a group of tensors that a model uses together.
type Block struct {
	Name string
	name span
}

// Section is a run of bytes that holds the arrays of one kind of one block.
type Section struct {
	Kind, reserved        uint32
	Block, Offset, Length uint64
}

// Tensor is a tensor of a weights file.
type Tensor struct {
	Name           string
	Dtype          uint32
	Encoding       uint32
	Block          uint64
	File           uint64
	FileOffset     uint64
	DimensionCount uint64
	Shape          [maxDimensions]uint64
	Parameters     [4]uint64
	Hash           Hash

	// Elements and Size (in bytes) are computed when the container is
	// opened; both are 0 where the dtype is unknown.
	Elements, Size uint64

	name                   span
	firstArray, arrayCount uint64
}

// Array is a run of bytes inside a section.
type Array struct{ Section, Offset, Length uint64 }

// Metadata is a key and its value.
type Metadata struct {
	Key, Value string
	key, value span
}

// cursor reads fields one after the other. After a list that does not fit it
// has failed, and returns zeros.
type cursor struct {
	b      []byte
	failed bool
}

func (c *cursor) take(n int) []byte {
	if c.failed || n > len(c.b) {
		c.failed = true
		return make([]byte, n)
	}
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) u32() uint32 { return binary.LittleEndian.Uint32(c.take(4)) }
func (c *cursor) u64() uint64 { return binary.LittleEndian.Uint64(c.take(8)) }
func (c *cursor) span() span  { return span{c.u64(), c.u64()} }

func (c *cursor) hash() (h Hash) {
	copy(h[:], c.take(len(h)))
	return h
}

// count reads the count of a list, and checks that as many records remain.
func (c *cursor) count(size int) int {
	n := c.u64()
	if n > uint64(len(c.b)/size) {
		c.failed = true
		return 0
	}
	return int(n)
}

// parseDirectory takes step 9 of section 9.
func parseDirectory(b []byte) (*Directory, error) {
	c := &cursor{b: b}
	d := &Directory{ShardIndex: c.u64(), ShardCount: c.u64(), Identity: c.hash()}
	d.Files = make([]File, c.count(80))
	for i := range d.Files {
		d.Files[i] = c.file()
	}
	d.Blocks = make([]Block, c.count(16))
	for i := range d.Blocks {
		d.Blocks[i].name = c.span()
	}
	d.Sections = make([]Section, c.count(32))
	for i := range d.Sections {
		d.Sections[i] = c.section()
	}
	d.Tensors = make([]Tensor, c.count(200))
	for i := range d.Tensors {
		d.Tensors[i] = c.tensor()
	}
	d.Arrays = make([]Array, c.count(24))
	for i := range d.Arrays {
		d.Arrays[i] = Array{c.u64(), c.u64(), c.u64()}
	}
	d.Checksums = make([]uint32, c.count(4))
	for i := range d.Checksums {
		d.Checksums[i] = c.u32()
	}
	d.Metadata = make([]Metadata, c.count(32))
	for i := range d.Metadata {
		d.Metadata[i] = Metadata{key: c.span(), value: c.span()}
	}
	d.text = string(c.take(c.count(1)))
	if c.failed {
		return nil, corrupt("a list does not fit into the directory")
	}
	if len(c.b) != 0 {
		return nil, corrupt("%d bytes are left over in the directory", len(c.b))
	}
	return d, nil
}

func (c *cursor) file() File {
	return File{
		Kind:       c.u32(),
		reserved:   c.u32(),
		path:       c.span(),
		Length:     c.u64(),
		Hash:       c.hash(),
		firstArray: c.u64(),
		arrayCount: c.u64(),
	}
}

func (c *cursor) section() Section {
	return Section{
		Kind:     c.u32(),
		reserved: c.u32(),
		Block:    c.u64(),
		Offset:   c.u64(),
		Length:   c.u64(),
	}
}

func (c *cursor) tensor() Tensor {
	t := Tensor{
		name:           c.span(),
		Dtype:          c.u32(),
		Encoding:       c.u32(),
		Block:          c.u64(),
		File:           c.u64(),
		FileOffset:     c.u64(),
		DimensionCount: c.u64(),
	}
	for i := range t.Shape {
		t.Shape[i] = c.u64()
	}
	t.firstArray, t.arrayCount = c.u64(), c.u64()
	for i := range t.Parameters {
		t.Parameters[i] = c.u64()
	}
	t.Hash = c.hash()
	return t
}
