package df11

import (
	"fmt"
	"math/bits"
)

// Kind is the kind of a problem (1, How a reader reports a problem).
type Kind int

// The three kinds.
const (
	Unsupported Kind = iota + 1
	Corrupt
	Limit
)

func (k Kind) String() string {
	return [...]string{"unknown", "Unsupported", "Corrupt", "Limit"}[k]
}

// Problem is an error that a file has, in the words of the text.
type Problem struct {
	Kind Kind
	Text string
}

func (p *Problem) Error() string {
	return p.Kind.String() + ": " + p.Text
}

// KindOf returns the kind of an error, or 0 if the error is none of a file.
func KindOf(err error) Kind {
	if p, ok := err.(*Problem); ok {
		return p.Kind
	}
	return 0
}

// failure is an error on its way up to try, which makes it one to return: a
// rule is one line then. Any other panic is a mistake of this program.
type failure struct{ error }

func try(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failure:
			err = p.error
		default:
			panic(p)
		}
	}()
	f()
	return nil
}

// check passes an error on.
func check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func (k Kind) fail(format string, args ...any) {
	check(&Problem{k, fmt.Sprintf(format, args...)})
}

// when fails if a rule is broken.
func (k Kind) when(broken bool, format string, args ...any) {
	if broken {
		k.fail(format, args...)
	}
}

// add, mul and align fail if the result exceeds 2^64 - 1 (1).

func add(a, b uint64) uint64 {
	sum, carry := bits.Add64(a, b, 0)
	Limit.when(carry != 0, "%d + %d exceeds 2^64 - 1", a, b)
	return sum
}

func mul(a, b uint64) uint64 {
	high, low := bits.Mul64(a, b)
	Limit.when(high != 0, "%d * %d exceeds 2^64 - 1", a, b)
	return low
}

// align is for powers of two only, as all alignments of the text are.
func align(x, a uint64) uint64 {
	return add(x, a-1) &^ (a - 1)
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
