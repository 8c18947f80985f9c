package df11

import (
	"strings"
	"unicode/utf8"
)

// textReader cuts the text into paths, names, keys and values, in their
// order and back to back (3, Text).
type textReader struct {
	text string
	at   uint64
}

// next returns the string of a span, of least to most bytes. The limit is
// checked first, so that a huge length is a Limit.
func (r *textReader) next(s span, least, most uint64, what string) (string, error) {
	switch {
	case s.length > most:
		return "", limit("a %s has %d bytes", what, s.length)
	case s.length < least:
		return "", corrupt("a %s has no bytes", what)
	case s.offset != r.at:
		return "", corrupt("a %s does not start where the text before ends", what)
	case s.length > uint64(len(r.text))-r.at:
		return "", corrupt("a %s ends beyond the text", what)
	}
	out := r.text[r.at : r.at+s.length]
	r.at += s.length
	if !utf8.ValidString(out) || strings.IndexByte(out, 0) >= 0 {
		return "", corrupt("a %s is not UTF-8 without NUL", what)
	}
	return out, nil
}

// readText sets all strings of the directory.
func (d *Directory) readText() (err error) {
	r := &textReader{text: d.text}
	for i := range d.Files {
		f := &d.Files[i]
		if f.Path, err = r.next(f.path, 1, maxNameBytes, "path"); err != nil {
			return err
		}
	}
	for i := range d.Blocks {
		b := &d.Blocks[i]
		if b.Name, err = r.next(b.name, 1, maxNameBytes, "name of a block"); err != nil {
			return err
		}
	}
	for i := range d.Tensors {
		t := &d.Tensors[i]
		if t.Name, err = r.next(t.name, 1, maxNameBytes, "name of a tensor"); err != nil {
			return err
		}
	}
	if err := d.readMetadata(r); err != nil {
		return err
	}
	if r.at != uint64(len(d.text)) {
		return corrupt("text is left over")
	}
	return nil
}

func (d *Directory) readMetadata(r *textReader) (err error) {
	for i := range d.Metadata {
		m := &d.Metadata[i]
		if m.Key, err = r.next(m.key, 1, maxKeyBytes, "key"); err != nil {
			return err
		}
		if m.Value, err = r.next(m.value, 0, maxValueBytes, "value"); err != nil {
			return err
		}
	}
	return nil
}

// checkMetadata checks section 3, Metadata.
func (d *Directory) checkMetadata() error {
	if len(d.Metadata) > 0 && d.ShardIndex != 0 {
		return corrupt("metadata in shard %d", d.ShardIndex)
	}
	total := uint64(0)
	for i, m := range d.Metadata {
		total += m.key.length + m.value.length
		if i > 0 && m.Key <= d.Metadata[i-1].Key {
			return corrupt("keys of the metadata do not ascend")
		}
	}
	if total > maxMetadataBytes {
		return limit("metadata of %d bytes", total)
	}
	return nil
}
