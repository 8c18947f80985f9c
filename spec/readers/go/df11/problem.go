package df11

import (
	"bytes"
	"fmt"
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

// when fails if a rule is broken.
func (k Kind) when(broken bool, format string, args ...any) {
	if broken {
		check(&Problem{k, fmt.Sprintf(format, args...)})
	}
}

// align is for powers of two that are far below 2^64 - 1, as is what it rounds.
func align(x, a uint64) uint64 { return (x + a - 1) &^ (a - 1) }

// ceilDiv does not overflow, whatever a is.
func ceilDiv(a, b uint64) uint64 {
	if a%b != 0 {
		return a/b + 1
	}
	return a / b
}

func min(a, b uint64) uint64 {
	if a < b {
		return a
	}
	return b
}

func allZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }
