package df11

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
)

// Header is the record of section 2.
type Header struct {
	Magic                                     [8]byte
	VersionMajor, VersionMinor                uint16
	State                                     uint32
	IncompatibleFeatures, CompatibleFeatures  uint64
	FileLength, DirectoryOffset, DirectoryLen uint64
	DirectoryChecksum, HeaderChecksum         uint32
}

// Container is an open df11 file.
type Container struct {
	Header
	Directory
	// Base has the bases of the tensors in delta (6.6), if it is there.
	Base  *Container
	bytes []byte
	right []bool // chunks that were checked (4)
}

// Open checks the bytes of a container at the level open of section 9.
func Open(b []byte) (*Container, error) {
	c := &Container{bytes: b}
	return c, try(func() {
		c.readHeader()
		directory := b[c.DirectoryOffset:][:c.DirectoryLen]
		wrong := crc32.ChecksumIEEE(directory) != c.DirectoryChecksum
		Corrupt.when(wrong, "directory_checksum is wrong")
		c.Directory = parseDirectory(directory)
		c.Directory.check(c.DirectoryOffset)
		c.right = make([]bool, len(c.Checksums))
	})
}

// readHeader takes the steps 1 to 7 of section 9.
func (c *Container) readHeader() {
	b, size := c.bytes, uint64(len(c.bytes))
	Corrupt.when(size < 12 || string(b[:8]) != magic, "the magic is not that of df11")
	version := binary.LittleEndian.Uint16(b[8:])
	Unsupported.when(version != versionMajor, "major version %d", version)
	Corrupt.when(size < headBytes+headerBytes, "%d bytes are too few for head and footer", size)
	check(binary.Read(bytes.NewReader(b), binary.LittleEndian, &c.Header))
	Corrupt.when(crc32.ChecksumIEEE(b[:60]) != c.HeaderChecksum, "header_checksum is wrong")
	Corrupt.when(c.State == 0, "the file is incomplete: it was never finished")
	Corrupt.when(c.State != 1, "state is %d", c.State)
	features := c.IncompatibleFeatures
	Unsupported.when(features != 0, "incompatible_features are %#x", features)
	Limit.when(c.FileLength > maxFileBytes, "file_length is %d", c.FileLength)
	Corrupt.when(c.FileLength != size, "file_length is %d, of %d bytes", c.FileLength, size)
	offset, length := c.DirectoryOffset, c.DirectoryLen
	Limit.when(length > maxDirectoryBytes, "directory_length is %d", length)
	wrong := offset < headBytes || offset%sectionAlignment != 0 || offset > size
	Corrupt.when(wrong, "directory_offset is %d", offset)
	end := align(offset+length, arrayAlignment)
	Corrupt.when(end+headerBytes != size, "the footer is not at %d", end)
	zeros := allZero(b[headerBytes:headBytes]) && allZero(b[offset+length:end])
	Corrupt.when(!zeros, "the bytes after the header or the directory are not zero")
	Corrupt.when(!bytes.Equal(b[end:], b[:headerBytes]), "the footer is no copy of the header")
}

// checkChunk checks a chunk of a section, once (4).
func (c *Container) checkChunk(section, chunk uint64) {
	at := c.firstChecksum[section] + chunk
	if c.right[at] {
		return
	}
	b := c.section(section)[chunk*chunkBytes:]
	wrong := crc32.ChecksumIEEE(b[:min(uint64(len(b)), chunkBytes)]) != c.Checksums[at]
	Corrupt.when(wrong, "checksum of chunk %d of section %d is wrong", chunk, section)
	c.right[at] = true
}

func (c *Container) section(i uint64) []byte {
	s := &c.Sections[i]
	return c.bytes[s.Offset:][:s.Length]
}

// stored returns the bytes of arrays, of which it checks the chunks first.
func (c *Container) stored(o Owner) (out [][]byte) {
	for _, a := range c.arraysOf(o) {
		for chunk := a.Offset / chunkBytes; chunk*chunkBytes < a.Offset+a.Length; chunk++ {
			c.checkChunk(a.Section, chunk)
		}
		out = append(out, c.section(a.Section)[a.Offset:][:a.Length])
	}
	return out
}

// Supported tells whether a tensor can be decoded (3, Tensor).
func (c *Container) Supported(t *Tensor) bool {
	o := c.source(t)
	known := knownDtype(o.Dtype) && o.Encoding <= encodingDelta
	return known && (o.Encoding != encodingDelta || c.baseOf(o) != nil)
}

// baseOf is the base of a tensor in delta, if it is there (6.6).
func (c *Container) baseOf(t *Tensor) *Tensor {
	for i := 0; c.Base != nil && i < len(c.Base.Tensors); i++ {
		o := &c.Base.Tensors[i]
		hash := Hash{}
		for at, p := range t.Parameters {
			binary.LittleEndian.PutUint64(hash[8*at:], p)
		}
		same := o.Dtype == t.Dtype && o.DimensionCount == t.DimensionCount && o.Shape == t.Shape
		if same && o.Hash == hash && c.Base.Text(o.Name) == c.Text(t.Name) {
			return o
		}
	}
	return nil
}

// source is the tensor that has the bytes: the target of an alias.
func (c *Container) source(t *Tensor) *Tensor {
	if t.Encoding == encodingAlias {
		return &c.Tensors[t.Parameters[0]]
	}
	return t
}

// Load decodes a tensor at the level load of section 9. Of a coded one it
// also reports what only verification must check.
func (c *Container) Load(t *Tensor) (b []byte, err error) {
	err = try(func() { b = c.decode(t) })
	return b, err
}

func (c *Container) decode(t *Tensor) []byte {
	Unsupported.when(!c.Supported(t), "tensor %q has dtype %d and encoding %d",
		c.Text(t.Name), t.Dtype, c.source(t).Encoding)
	t = c.source(t)
	arrays := c.stored(t.Owner)
	switch t.Encoding {
	case encodingGap:
		return decodeGap(t, arrays)
	case encodingTile, encodingFloat:
		return decodeTile(t, arrays)
	case encodingDelta:
		return decodeDelta(t, arrays, c.Base.decode(c.baseOf(t)))
	}
	return bytes.Join(arrays, nil)
}
