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
	VersionMajor, VersionMinor                     uint16
	State                                          uint32
	IncompatibleFeatures, CompatibleFeatures       uint64
	FileLength, DirectoryOffset, DirectoryLen      uint64
	DirectoryChecksum, HeaderChecksum, ownChecksum uint32
}

func parseHeader(b []byte) Header {
	le := binary.LittleEndian
	return Header{
		VersionMajor:         le.Uint16(b[8:]),
		VersionMinor:         le.Uint16(b[10:]),
		State:                le.Uint32(b[12:]),
		IncompatibleFeatures: le.Uint64(b[16:]),
		CompatibleFeatures:   le.Uint64(b[24:]),
		FileLength:           le.Uint64(b[32:]),
		DirectoryOffset:      le.Uint64(b[40:]),
		DirectoryLen:         le.Uint64(b[48:]),
		DirectoryChecksum:    le.Uint32(b[56:]),
		HeaderChecksum:       le.Uint32(b[60:]),
		ownChecksum:          crc32.ChecksumIEEE(b[:60]),
	}
}

// readAt fills a new slice, whose size the caller has bounded by the length
// of the file.
func readAt(r io.ReaderAt, offset, length uint64) ([]byte, error) {
	b := make([]byte, length)
	n, err := r.ReadAt(b, int64(offset))
	if n == len(b) {
		return b, nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return nil, err
}

// readHeader takes the steps 1 to 7 of section 9.
func readHeader(r io.ReaderAt, size uint64) (Header, error) {
	var h Header
	head, err := readAt(r, 0, minU64(size, headBytes))
	if err != nil {
		return h, err
	}
	if err := checkStart(head, size); err != nil {
		return h, err
	}
	h = parseHeader(head)
	if err := first(
		func() error { return checkHeaderFields(h) },
		func() error { return checkPlace(h, size) },
	); err != nil {
		return h, err
	}
	return h, checkFrame(r, h, head)
}

// checkStart takes step 1, step 2 and the length of step 3.
func checkStart(head []byte, size uint64) error {
	if len(head) < 12 {
		return corrupt("the file has %d bytes, fewer than 12", size)
	}
	if string(head[:8]) != magic {
		return corrupt("the magic is not that of df11")
	}
	if v := binary.LittleEndian.Uint16(head[8:]); v != versionMajor {
		return unsupported("major version %d", v)
	}
	if size < headBytes+headerBytes {
		return corrupt("the file has %d bytes, fewer than a head and a footer", size)
	}
	return nil
}

// checkHeaderFields takes the rest of step 3, and steps 4 and 5.
func checkHeaderFields(h Header) error {
	switch {
	case h.HeaderChecksum != h.ownChecksum:
		return corrupt("header_checksum is wrong")
	case h.State == 0:
		return corrupt("the file is incomplete: it was never finished")
	case h.State != 1:
		return corrupt("state is %d", h.State)
	case h.IncompatibleFeatures != 0:
		return unsupported("incompatible_features are %#x", h.IncompatibleFeatures)
	}
	return nil
}

// checkPlace takes step 6.
func checkPlace(h Header, size uint64) error {
	switch {
	case h.FileLength > maxFileBytes:
		return limit("file_length is %d", h.FileLength)
	case h.FileLength != size:
		return corrupt("file_length is %d, the file has %d bytes", h.FileLength, size)
	case h.DirectoryLen > maxDirectoryBytes:
		return limit("directory_length is %d", h.DirectoryLen)
	case h.DirectoryOffset < headBytes || h.DirectoryOffset%sectionAlignment != 0:
		return corrupt("directory_offset is %d", h.DirectoryOffset)
	}
	end, ok := add(h.DirectoryOffset, h.DirectoryLen)
	if ok {
		end, ok = align(end, arrayAlignment)
	}
	if ok {
		end, ok = add(end, headerBytes)
	}
	if !ok {
		return overflow("the end of the directory")
	}
	if end != size {
		return corrupt("directory and footer end at %d, the file at %d", end, size)
	}
	return nil
}

// checkFrame takes step 7.
func checkFrame(r io.ReaderAt, h Header, head []byte) error {
	if !allZero(head[headerBytes:]) {
		return corrupt("the head is not zero after the header")
	}
	end := h.DirectoryOffset + h.DirectoryLen
	tail, err := readAt(r, end, h.FileLength-end)
	if err != nil {
		return err
	}
	space, footer := tail[:len(tail)-headerBytes], tail[len(tail)-headerBytes:]
	if !allZero(space) {
		return corrupt("the bytes between directory and footer are not zero")
	}
	if !bytes.Equal(footer, head[:headerBytes]) {
		return corrupt("the footer is no copy of the header")
	}
	return nil
}
