package df11

import "fmt"

// Kind is the kind of a problem (1, How a reader reports a problem).
type Kind int

// The three kinds.
const (
	Unsupported Kind = iota + 1
	Corrupt
	Limit
)

func (k Kind) String() string {
	switch k {
	case Unsupported:
		return "Unsupported"
	case Corrupt:
		return "Corrupt"
	case Limit:
		return "Limit"
	}
	return "unknown"
}

// Problem is an error that a file has, in the words of the text.
type Problem struct {
	Kind Kind
	Text string
}

func (p *Problem) Error() string {
	return p.Kind.String() + ": " + p.Text
}

func corrupt(format string, args ...any) error {
	return &Problem{Corrupt, fmt.Sprintf(format, args...)}
}

func limit(format string, args ...any) error {
	return &Problem{Limit, fmt.Sprintf(format, args...)}
}

func unsupported(format string, args ...any) error {
	return &Problem{Unsupported, fmt.Sprintf(format, args...)}
}

// overflow is arithmetic that exceeds 2^64 - 1 (1).
func overflow(what string) error {
	return limit("%s exceeds 2^64 - 1", what)
}

// KindOf returns the kind of an error, or 0 if the error is none of a file.
func KindOf(err error) Kind {
	if p, ok := err.(*Problem); ok {
		return p.Kind
	}
	return 0
}

// first returns the first error of a sequence of checks, and stops there.
func first(checks ...func() error) error {
	for _, check := range checks {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}
