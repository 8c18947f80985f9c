package df11

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
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
	r      io.ReaderAt
	chunks []chunkState // as many as checksums
}

// chunkState remembers which chunks were checked (4).
type chunkState byte

const (
	chunkUnread chunkState = iota
	chunkRight
	chunkWrong
)

// Open checks a container of size bytes at the level open of section 9.
func Open(r io.ReaderAt, size uint64) (*Container, error) {
	c := &Container{r: r}
	return c, try(func() {
		c.readHeader(size)
		b := c.readAt(c.DirectoryOffset, c.DirectoryLen)
		Corrupt.when(crc32.ChecksumIEEE(b) != c.DirectoryChecksum, "directory_checksum is wrong")
		c.Directory = parseDirectory(b)
		c.Directory.check(c.DirectoryOffset)
		c.chunks = make([]chunkState, len(c.Checksums))
	})
}

// readAt fills a new slice, whose size the caller has bounded by the length
// of the file.
func (c *Container) readAt(offset, length uint64) []byte {
	b := make([]byte, length)
	n, err := c.r.ReadAt(b, int64(offset))
	if n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		check(err)
	}
	return b
}

// readHeader takes the steps 1 to 7 of section 9.
func (c *Container) readHeader(size uint64) {
	head := c.readAt(0, minU64(size, headBytes))
	Corrupt.when(size < 12, "the file has %d bytes, fewer than 12", size)
	Corrupt.when(string(head[:8]) != magic, "the magic is not that of df11")
	version := binary.LittleEndian.Uint16(head[8:])
	Unsupported.when(version != versionMajor, "major version %d", version)
	short := size < headBytes+headerBytes
	Corrupt.when(short, "the file has %d bytes, fewer than a head and a footer", size)
	check(binary.Read(bytes.NewReader(head), binary.LittleEndian, &c.Header))
	Corrupt.when(crc32.ChecksumIEEE(head[:60]) != c.HeaderChecksum, "header_checksum is wrong")
	Corrupt.when(c.State == 0, "the file is incomplete: it was never finished")
	Corrupt.when(c.State != 1, "state is %d", c.State)
	features := c.IncompatibleFeatures
	Unsupported.when(features != 0, "incompatible_features are %#x", features)
	Limit.when(c.FileLength > maxFileBytes, "file_length is %d", c.FileLength)
	other := c.FileLength != size
	Corrupt.when(other, "file_length is %d, the file has %d bytes", c.FileLength, size)
	offset, length := c.DirectoryOffset, c.DirectoryLen
	Limit.when(length > maxDirectoryBytes, "directory_length is %d", length)
	misplaced := offset < headBytes || offset%sectionAlignment != 0
	Corrupt.when(misplaced, "directory_offset is %d", offset)
	end := add(align(add(offset, length), arrayAlignment), headerBytes)
	Corrupt.when(end != size, "directory and footer end at %d, the file at %d", end, size)
	c.checkFrame(head)
}

// checkFrame takes step 7.
func (c *Container) checkFrame(head []byte) {
	Corrupt.when(!allZero(head[headerBytes:]), "the head is not zero after the header")
	end := c.DirectoryOffset + c.DirectoryLen
	tail := c.readAt(end, c.FileLength-end)
	space, footer := tail[:len(tail)-headerBytes], tail[len(tail)-headerBytes:]
	Corrupt.when(!allZero(space), "the bytes between directory and footer are not zero")
	Corrupt.when(!bytes.Equal(footer, head[:headerBytes]), "the footer is no copy of the header")
}

// checkChunk checks a chunk of a section, once (4).
func (c *Container) checkChunk(section, chunk uint64) {
	at := c.firstChecksum[section] + chunk
	if c.chunks[at] == chunkUnread {
		s := &c.Sections[section]
		begin := chunk * chunkBytes
		b := c.readAt(s.Offset+begin, minU64(s.Length-begin, chunkBytes))
		c.chunks[at] = chunkWrong
		if crc32.ChecksumIEEE(b) == c.Checksums[at] {
			c.chunks[at] = chunkRight
		}
	}
	wrong := c.chunks[at] == chunkWrong
	Corrupt.when(wrong, "checksum of chunk %d of section %d is wrong", chunk, section)
}

// read reads a part of an array, of which it checks the chunks first.
func (c *Container) read(a Array, from, length uint64) []byte {
	begin := a.Offset + from
	for chunk := begin / chunkBytes; chunk*chunkBytes < begin+length; chunk++ {
		c.checkChunk(a.Section, chunk)
	}
	return c.readAt(c.Sections[a.Section].Offset+begin, length)
}

// copyArrays writes arrays, in pieces of bounded size.
func (c *Container) copyArrays(arrays []Array, w io.Writer) {
	for _, a := range arrays {
		for at := uint64(0); at < a.Length; at += chunkBytes {
			_, err := w.Write(c.read(a, at, minU64(a.Length-at, chunkBytes)))
			check(err)
		}
	}
}

// Supported tells whether a tensor can be decoded (3, Tensor).
func (c *Container) Supported(t *Tensor) bool {
	o := c.source(t)
	return knownDtype(o.Dtype) && o.Encoding <= encodingTile
}

// source is the tensor that has the bytes: the target of an alias.
func (c *Container) source(t *Tensor) *Tensor {
	if t.Encoding == encodingAlias {
		return &c.Tensors[t.Parameters[0]]
	}
	return t
}

// Load decodes a tensor at the level load of section 9.
func (c *Container) Load(t *Tensor, w io.Writer) error {
	return try(func() { c.decode(t, w, false) })
}

// decode writes the bytes of a tensor to w. If strict, it checks what only a
// verifier must check too (9). A coded tensor is written when all of it was
// found right; a raw one chunk by chunk.
func (c *Container) decode(t *Tensor, w io.Writer, strict bool) {
	name := c.Text(t.Name)
	Unsupported.when(!c.Supported(t), "tensor %q has dtype %d and encoding %d",
		name, t.Dtype, c.source(t).Encoding)
	t = c.source(t)
	if t.Encoding == encodingRaw {
		c.copyArrays(c.arraysOf(t), w)
		return
	}
	var arrays [][]byte
	for _, a := range c.arraysOf(t) {
		arrays = append(arrays, c.read(a, 0, a.Length))
	}
	decode := decodeGap
	if t.Encoding == encodingTile {
		decode = decodeTile
	}
	_, err := w.Write(decode(t, arrays, strict))
	check(err)
}

// putWeight joins exponent and sign/mantissa byte (6.3).
func putWeight(out []byte, exponent, signMantissa byte) {
	s := uint16(signMantissa)
	binary.LittleEndian.PutUint16(out, (s&0x80)<<8|uint16(exponent)<<7|s&0x7F)
}
