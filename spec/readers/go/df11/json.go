package df11

import (
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is the number of arrays and objects in each other that are read;
// more are Corrupt (7).
const maxDepth = 100

// jsonReader reads one JSON text as strictly as section 7 wants it.
type jsonReader struct {
	b     []byte
	at    int
	depth int
}

func (j *jsonReader) fail(what string) error {
	return corrupt("the header is wrong at byte %d: %s", 8+j.at, what)
}

// text reads the whole JSON text: an object, whose members go to member.
func (j *jsonReader) text(member func(key string) error) error {
	if !utf8.Valid(j.b) {
		return j.fail("no UTF-8")
	}
	if err := j.object(member); err != nil {
		return err
	}
	if j.peek() != 0 || j.at < len(j.b) {
		return j.fail("more than one value")
	}
	return nil
}

// peek skips white space and returns the next byte, or 0 at the end.
func (j *jsonReader) peek() byte {
	for ; j.at < len(j.b); j.at++ {
		switch j.b[j.at] {
		case ' ', '\t', '\n', '\r':
		default:
			return j.b[j.at]
		}
	}
	return 0
}

// accept takes a byte after white space, if it is the next one.
func (j *jsonReader) accept(want byte) bool {
	if j.peek() != want || j.at == len(j.b) {
		return false
	}
	j.at++
	return true
}

// list reads items between two brackets, divided by commas.
func (j *jsonReader) list(open, end byte, item func() error) error {
	if !j.accept(open) {
		return j.fail("no " + string(open))
	}
	if j.depth++; j.depth > maxDepth {
		return j.fail("too deep")
	}
	defer func() { j.depth-- }()
	if j.accept(end) {
		return nil
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if j.accept(end) {
			return nil
		}
		if !j.accept(',') {
			return j.fail("no comma")
		}
	}
}

// object hands each key to member, which reads the value.
func (j *jsonReader) object(member func(key string) error) error {
	seen := map[string]bool{}
	return j.list('{', '}', func() error {
		key, err := j.string()
		if err != nil {
			return err
		}
		if seen[key] {
			return j.fail("two members have the name " + strconv.Quote(key))
		}
		seen[key] = true
		if !j.accept(':') {
			return j.fail("no colon")
		}
		return member(key)
	})
}

func (j *jsonReader) array(item func() error) error {
	return j.list('[', ']', item)
}

// skip reads a value that means nothing here.
func (j *jsonReader) skip() error {
	switch c := j.peek(); {
	case c == '{':
		return j.object(func(string) error { return j.skip() })
	case c == '[':
		return j.array(j.skip)
	case c == '"':
		_, err := j.string()
		return err
	case c == '-' || (c >= '0' && c <= '9'):
		_, err := j.number()
		return err
	}
	for _, word := range [...]string{"null", "true", "false"} {
		if j.word(word) {
			return nil
		}
	}
	return j.fail("no value")
}

// word takes a word that stands right here.
func (j *jsonReader) word(word string) bool {
	end := j.at + len(word)
	if end > len(j.b) || string(j.b[j.at:end]) != word {
		return false
	}
	j.at = end
	return true
}

func (j *jsonReader) digits() int {
	begin := j.at
	for j.at < len(j.b) && j.b[j.at] >= '0' && j.b[j.at] <= '9' {
		j.at++
	}
	return j.at - begin
}

func (j *jsonReader) is(chars string) bool {
	for i := range chars {
		if j.at < len(j.b) && j.b[j.at] == chars[i] {
			return true
		}
	}
	return false
}

// number reads a number of RFC 8259 and returns its text.
func (j *jsonReader) number() (string, error) {
	j.peek()
	begin := j.at
	if j.is("-") {
		j.at++
	}
	whole := j.at
	if n := j.digits(); n == 0 || (n > 1 && j.b[whole] == '0') {
		return "", j.fail("no number")
	}
	if j.is(".") {
		j.at++
		if j.digits() == 0 {
			return "", j.fail("a fraction without digits")
		}
	}
	if j.is("eE") {
		j.at++
		if j.is("+-") {
			j.at++
		}
		if j.digits() == 0 {
			return "", j.fail("an exponent without digits")
		}
	}
	text := string(j.b[begin:j.at])
	if _, err := strconv.ParseFloat(text, 64); err != nil {
		return "", j.fail("a number beyond the range of a double")
	}
	return text, nil
}

// integer reads digits alone, less than 2^64.
func (j *jsonReader) integer() (uint64, error) {
	text, err := j.number()
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, j.fail(strconv.Quote(text) + " is no integer here")
	}
	return n, nil
}

// string reads a string and resolves its escapes.
func (j *jsonReader) string() (string, error) {
	if !j.accept('"') {
		return "", j.fail("no string")
	}
	var out []byte
	for j.at < len(j.b) {
		c := j.b[j.at]
		j.at++
		switch {
		case c == '"':
			return string(out), nil
		case c < 0x20:
			return "", j.fail("a control character in a string")
		case c == '\\':
			r, err := j.escape()
			if err != nil {
				return "", err
			}
			out = utf8.AppendRune(out, r)
		default:
			out = append(out, c)
		}
	}
	return "", j.fail("a string does not end")
}

// escape reads what follows a backslash.
func (j *jsonReader) escape() (rune, error) {
	if j.at == len(j.b) {
		return 0, j.fail("an escape does not end")
	}
	c := j.b[j.at]
	j.at++
	switch c {
	case '"', '\\', '/':
		return rune(c), nil
	case 'b':
		return '\b', nil
	case 'f':
		return '\f', nil
	case 'n':
		return '\n', nil
	case 'r':
		return '\r', nil
	case 't':
		return '\t', nil
	case 'u':
		return j.unicode()
	}
	return 0, j.fail("an unknown escape")
}

// unicode reads what follows `\u`: a character, or a pair of surrogates.
func (j *jsonReader) unicode() (rune, error) {
	r, ok := j.hex()
	if ok && utf16.IsSurrogate(r) {
		low := rune(0)
		if ok = j.word(`\u`); ok {
			low, ok = j.hex()
		}
		r = utf16.DecodeRune(r, low)
		ok = ok && r != utf8.RuneError
	}
	if !ok {
		return 0, j.fail("a wrong escape, or half a surrogate pair")
	}
	return r, nil
}

func (j *jsonReader) hex() (rune, bool) {
	if len(j.b)-j.at < 4 {
		return 0, false
	}
	r := rune(0)
	for _, c := range j.b[j.at : j.at+4] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	j.at += 4
	return r, true
}
