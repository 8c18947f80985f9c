package df11

import (
	"encoding/binary"
	"math/bits"
)

// Numbers of 6.6.
const (
	deltaTotal      = 2048    // of the frequencies of a context
	deltaEscape     = 104     // the last token
	deltaLeast      = 1 << 31 // state at the end of a segment
	deltaSegment    = 1 << 18
	deltaMaxRows    = 1 << 23
	deltaHead       = 4 + 4*8
	deltaMaxContext = 16
)

// deltaToken is a token of a context.
type deltaToken struct {
	token            uint64
	frequency, start uint64
}

// segmentElements are the weights of each segment but the last (Segments).
func segmentElements(t *Tensor) uint64 {
	shape := t.Shape[:t.DimensionCount]
	if len(shape) > 3 {
		shape = shape[1:]
	} else if len(shape) > 1 {
		shape = shape[len(shape)-1:]
	}
	rows := uint64(32)
	for _, n := range shape {
		high, low := bits.Mul64(rows, n)
		if high > 0 || low > deltaMaxRows {
			return deltaSegment
		}
		rows = low
	}
	return ceilDiv(deltaSegment, rows) * rows
}

// shapeOfDelta checks the lengths of the arrays of a tensor with weights, and
// returns them.
func shapeOfDelta(t *Tensor, arrays []Array) []uint64 {
	elements, _ := t.Measure()
	codebook, bitstream := arrays[0].Length, arrays[2].Length
	segments := ceilDiv(elements, segmentElements(t))
	Corrupt.when(codebook < 6 || codebook > 5058, "a codebook has %d bytes", codebook)
	wrong := bitstream%4 != 0 || bitstream/deltaHead < segments
	Corrupt.when(wrong, "%d segments have %d bytes", segments, bitstream)
	return []uint64{codebook, 8 * (segments + 1), bitstream}
}

// readDeltaCode reads the codebook: top, and the contexts.
func readDeltaCode(b []byte) (top uint64, contexts [][]deltaToken) {
	take := func(n int) []byte {
		Corrupt.when(len(b) < n, "the codebook ends early")
		taken := b[:n]
		b = b[n:]
		return taken
	}
	head := take(2)
	count := head[1]
	Corrupt.when(count < 1 || count > deltaMaxContext, "there are %d contexts", count)
	for ; count > 0; count-- {
		var context []deltaToken
		next, start := uint64(0), uint64(0)
		for n := take(1)[0]; n > 0; n-- {
			entry := take(3)
			token := uint64(entry[0])
			frequency := uint64(binary.LittleEndian.Uint16(entry[1:]))
			Corrupt.when(token < next || token > deltaEscape, "token %d does not ascend", token)
			Corrupt.when(frequency < 1 || frequency > deltaTotal, "a frequency is %d", frequency)
			context = append(context, deltaToken{token, frequency, start})
			next, start = token+1, start+frequency
		}
		Corrupt.when(start != deltaTotal && context != nil, "frequencies add up to %d", start)
		contexts = append(contexts, context)
	}
	Corrupt.when(len(b) > 0, "bytes follow the last context")
	return uint64(head[0]), contexts
}

// decodeDelta turns the weights of the base into those of a tensor.
func decodeDelta(t *Tensor, arrays [][]byte, base []byte) []byte {
	top, contexts := readDeltaCode(arrays[0])
	records, bitstream := arrays[1], arrays[2]
	out, each := append([]byte(nil), base...), 2*segmentElements(t)
	at := uint64(0)
	Corrupt.when(binary.LittleEndian.Uint64(records) != 0, "the first record is not 0")
	for rest := out; len(rest) > 0; {
		records = records[8:]
		end := binary.LittleEndian.Uint64(records)
		wrong := end%4 != 0 || end > uint64(len(bitstream)) || end < at+deltaHead
		Corrupt.when(wrong, "a segment ends at %d", end)
		n := min(each, uint64(len(rest)))
		decodeSegment(bitstream[at:end], top, contexts, rest[:n])
		at, rest = end, rest[n:]
	}
	Corrupt.when(at != uint64(len(bitstream)), "the last segment ends at %d", at)
	return out
}

// decodeSegment decodes a segment, whose weights are those of the base before.
func decodeSegment(b []byte, top uint64, contexts [][]deltaToken, weights []byte) {
	words := uint64(binary.LittleEndian.Uint32(b))
	Corrupt.when(uint64(len(b)-deltaHead)/4 < words, "a segment has fewer than %d words", words)
	states := [4]uint64{}
	for s := range states {
		states[s] = binary.LittleEndian.Uint64(b[4+8*s:])
		wrong := states[s] < deltaLeast || states[s]>>63 > 0
		Corrupt.when(wrong, "a segment starts with the state %d", states[s])
	}
	code, raw, bit := b[deltaHead:][:4*words], b[deltaHead+4*words:], uint64(0)
	for i := 0; i < len(weights); i += 2 {
		base := binary.LittleEndian.Uint16(weights[i:])
		z := nextDifference(&states[i/2%4], contextOf(base, top, contexts), raw, &bit)
		binary.LittleEndian.PutUint16(weights[i:], weightFrom(base, uint16(z)))
		if i/2%8 != 7 && i+2 < len(weights) {
			continue
		}
		for s := range states {
			if states[s] < deltaLeast {
				Corrupt.when(len(code) < 4, "a segment has too few words")
				states[s] = states[s]<<32 | uint64(binary.LittleEndian.Uint32(code))
				code = code[4:]
			}
		}
	}
	end := [4]uint64{deltaLeast, deltaLeast, deltaLeast, deltaLeast}
	Corrupt.when(states != end || len(code) > 0, "the states of a segment do not end right")
	Corrupt.when(8*uint64(len(raw))-bit >= 32, "a segment has too many raw bits")
	checkZeroBits(raw, bit, 8*uint64(len(raw)), "after the raw bits")
}

// contextOf is the context of a weight with this base.
func contextOf(base uint16, top uint64, contexts [][]deltaToken) []deltaToken {
	exponent, at := uint64(base>>7&0xFF), uint64(0)
	if exponent < top {
		at = min(top-exponent, uint64(len(contexts)-1))
	}
	Corrupt.when(contexts[at] == nil, "context %d has no tokens", at)
	return contexts[at]
}

// nextDifference decodes a token by a state, and the raw bits of its difference.
func nextDifference(state *uint64, context []deltaToken, raw []byte, bit *uint64) uint64 {
	slot, found := *state%deltaTotal, deltaToken{}
	for _, token := range context {
		if token.start <= slot {
			found = token
		}
	}
	*state = found.frequency*(*state/deltaTotal) + slot - found.start
	if found.token < 64 {
		return found.token
	}
	first, count := uint64(0), uint64(16)
	if found.token < deltaEscape {
		count = (found.token-64)/4 + 4
		first = (4 + found.token%4) << count
	}
	for i := uint64(0); i < count; i++ {
		Corrupt.when(*bit >= 8*uint64(len(raw)), "raw bits end early")
		first += uint64(raw[*bit/8]>>(*bit%8)&1) << i
		*bit++
	}
	return first
}

// weightFrom is the weight that differs from its base by z (Differences).
func weightFrom(base, z uint16) uint16 {
	order := base ^ 0x8000
	if base&0x8000 > 0 {
		order = ^base
	}
	if z%2 == 0 {
		order += z / 2
	} else {
		order -= z/2 + 1
	}
	if order&0x8000 > 0 {
		return order ^ 0x8000
	}
	return ^order
}
