package df11

import (
	"hash/crc32"
	"io"
)

// Container is an open df11 file.
type Container struct {
	Header
	Directory
	r      io.ReaderAt
	chunks chunkTable
}

// Open checks a container of size bytes at the level open of section 9.
func Open(r io.ReaderAt, size uint64) (*Container, error) {
	h, err := readHeader(r, size)
	if err != nil {
		return nil, err
	}
	b, err := readAt(r, h.DirectoryOffset, h.DirectoryLen)
	if err != nil {
		return nil, err
	}
	if crc32.ChecksumIEEE(b) != h.DirectoryChecksum {
		return nil, corrupt("directory_checksum is wrong")
	}
	d, err := parseDirectory(b)
	if err != nil {
		return nil, err
	}
	if err := d.check(h.DirectoryOffset); err != nil {
		return nil, err
	}
	return &Container{h, *d, r, newChunkTable(d)}, nil
}

// check takes the steps 10 and 11 of section 9. Later checks rely on those
// before them.
func (d *Directory) check(directoryOffset uint64) error {
	return first(
		d.checkKinds,
		d.checkShards,
		d.readText,
		d.checkMetadata,
		d.checkFiles,
		d.checkBlocks,
		func() error { return d.checkSections(directoryOffset) },
		d.checkTensors,
		d.checkArrays,
		d.checkEncodings,
		d.checkChecksumCount,
	)
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
