package df11

import "hash/crc32"

// chunkTable remembers which chunks were checked (4).
type chunkTable struct {
	first []int // of each section: index of its first checksum
	state []byte
}

const (
	chunkUnread = iota
	chunkRight
	chunkWrong
)

func newChunkTable(d *Directory) chunkTable {
	t := chunkTable{make([]int, len(d.Sections)), make([]byte, len(d.Checksums))}
	at := 0
	for i := range d.Sections {
		t.first[i] = at
		at += int(ceilDiv(d.Sections[i].Length, chunkBytes))
	}
	return t
}

// checkChunk checks a chunk of a section, once.
func (c *Container) checkChunk(section, chunk uint64) error {
	at := c.chunks.first[section] + int(chunk)
	if c.chunks.state[at] == chunkUnread {
		s := &c.Sections[section]
		begin := chunk * chunkBytes
		b, err := readAt(c.r, s.Offset+begin, minU64(s.Length-begin, chunkBytes))
		if err != nil {
			return err
		}
		c.chunks.state[at] = chunkWrong
		if crc32.ChecksumIEEE(b) == c.Checksums[at] {
			c.chunks.state[at] = chunkRight
		}
	}
	if c.chunks.state[at] == chunkWrong {
		return corrupt("checksum of chunk %d of section %d is wrong", chunk, section)
	}
	return nil
}

// readArray reads a part of an array, of which it checks the chunks first.
func (c *Container) readArray(a Array, from, length uint64) ([]byte, error) {
	begin := a.Offset + from
	if length > 0 {
		last := (begin + length - 1) / chunkBytes
		for chunk := begin / chunkBytes; chunk <= last; chunk++ {
			if err := c.checkChunk(a.Section, chunk); err != nil {
				return nil, err
			}
		}
	}
	return readAt(c.r, c.Sections[a.Section].Offset+begin, length)
}

// eachPiece hands an array to f, in pieces of bounded size.
func (c *Container) eachPiece(a Array, f func([]byte) error) error {
	for at := uint64(0); at < a.Length; at += chunkBytes {
		b, err := c.readArray(a, at, minU64(a.Length-at, chunkBytes))
		if err != nil {
			return err
		}
		if err := f(b); err != nil {
			return err
		}
	}
	return nil
}

// readArrays reads all arrays of a tensor whole.
func (c *Container) readArrays(t *Tensor) ([][]byte, error) {
	arrays := c.arraysOf(t)
	out := make([][]byte, len(arrays))
	for i, a := range arrays {
		b, err := c.readArray(a, 0, a.Length)
		if err != nil {
			return nil, err
		}
		out[i] = b
	}
	return out, nil
}
