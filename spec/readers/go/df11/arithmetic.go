package df11

import "math/bits"

// add, mul and align tell by false that the result exceeds 2^64 - 1 (1).

func add(a, b uint64) (uint64, bool) {
	sum, carry := bits.Add64(a, b, 0)
	return sum, carry == 0
}

func mul(a, b uint64) (uint64, bool) {
	high, low := bits.Mul64(a, b)
	return low, high == 0
}

// align is for powers of two only, as all alignments of the text are.
func align(x, a uint64) (uint64, bool) {
	sum, ok := add(x, a-1)
	return sum &^ (a - 1), ok
}

// ceilDiv does not overflow, whatever a is.
func ceilDiv(a, b uint64) uint64 {
	q := a / b
	if a%b != 0 {
		q++
	}
	return q
}

func minU64(a, b uint64) uint64 {
	if a < b {
		return a
	}
	return b
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
