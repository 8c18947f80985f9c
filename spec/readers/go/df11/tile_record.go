package df11

import "encoding/binary"

const lanes = 32

// tileRecord is a record of 6.4.
type tileRecord struct {
	offset, least uint64
	shift         uint
	excesses      []byte // 24 bytes
}

func (d *tileDecoder) record(i uint64) tileRecord {
	b := d.records[32*i : 32*i+32]
	word := binary.LittleEndian.Uint64(b)
	return tileRecord{word & (1<<48 - 1), word >> 48 & (1<<13 - 1), uint(word >> 61), b[8:]}
}

// length is the length of a lane in bits.
func (r *tileRecord) length(lane int) uint64 {
	return r.least + uint64(bitsAt(r.excesses, 6*uint64(lane), 6))<<r.shift
}

// checkLastRecord checks the record after those of the tiles.
func (d *tileDecoder) checkLastRecord(tiles uint64) error {
	r := d.record(tiles)
	if r.offset != d.bitCount {
		return corrupt("the last record has offset %d and not bit_count", r.offset)
	}
	if r.least != 0 || r.shift != 0 || !allZero(r.excesses) {
		return corrupt("the last record has more than an offset")
	}
	return nil
}

// checkEnd checks the offset of a tile, and that its lanes end at the next.
func (d *tileDecoder) checkEnd(i uint64, r tileRecord, next uint64) error {
	if r.offset%8 != 0 || r.offset > d.bitCount || next%8 != 0 || next > d.bitCount {
		return corrupt("tile %d starts at bit %d, and the next at %d", i, r.offset, next)
	}
	end := r.offset
	for l := 0; l < lanes; l++ {
		end += r.length(l)
	}
	if end = (end + 7) &^ 7; end != next {
		return corrupt("tile %d ends at bit %d, and the next starts at %d", i, end, next)
	}
	return nil
}

// checkChoice checks least and shift, from the bits of the pairs of each lane:
// they are those that a writer must choose.
func (r *tileRecord) checkChoice(i uint64, used *[lanes]uint64) error {
	least, most := used[0], used[0]
	for _, n := range used {
		least = minU64(least, n)
		if n > most {
			most = n
		}
	}
	shift := uint(0)
	for ceilDiv(most-least, 1<<shift) > 63 {
		shift++
	}
	if r.least != least || r.shift != shift {
		return corrupt("tile %d has least %d and shift %d and not %d and %d",
			i, r.least, r.shift, least, shift)
	}
	return nil
}
