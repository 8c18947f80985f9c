package df11

import "fmt"

// Report is the result of verification (9).
type Report struct {
	Wrong     []error  // what was checked and is wrong
	Unchecked []string // what could not be checked
	Broken    error    // a failure of the storage, which ended verification
}

// Exit is the exit code of the command. The text has none for a failure of
// the storage; 3 is a choice of this program.
func (r *Report) Exit() int {
	switch {
	case r.Broken != nil:
		return 3
	case len(r.Wrong) > 0:
		return 1
	case len(r.Unchecked) > 0:
		return 2
	}
	return 0
}

// add records the result of a check and tells whether it was good.
func (r *Report) add(err error) bool {
	switch KindOf(err) {
	case Corrupt, Limit:
		r.Wrong = append(r.Wrong, err)
	case Unsupported:
		r.skip("%s", err)
	default:
		if err != nil && r.Broken == nil {
			r.Broken = err
		}
	}
	return err == nil
}

func (r *Report) skip(format string, args ...any) {
	r.Unchecked = append(r.Unchecked, fmt.Sprintf(format, args...))
}
