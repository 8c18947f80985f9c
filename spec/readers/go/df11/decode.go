package df11

import (
	"encoding/binary"
	"io"
)

// decode writes the bytes of a tensor to w. If strict, it checks what only a
// verifier must check too (9). A coded tensor is written when all of it was
// found right; a raw one chunk by chunk.
func (c *Container) decode(t *Tensor, w io.Writer, strict bool) error {
	if !c.Supported(t) {
		return unsupported("tensor %q has dtype %d and encoding %d",
			t.Name, t.Dtype, c.source(t).Encoding)
	}
	t = c.source(t)
	if t.Encoding == encodingRaw {
		return c.decodeRaw(t, w)
	}
	arrays, err := c.readArrays(t)
	if err != nil {
		return err
	}
	var out []byte
	if t.Encoding == encodingGap {
		out, err = decodeGap(t, arrays, strict)
	} else {
		out, err = decodeTile(t, arrays, strict)
	}
	if err != nil {
		return err
	}
	_, err = w.Write(out)
	return err
}

func (c *Container) decodeRaw(t *Tensor, w io.Writer) error {
	for _, a := range c.arraysOf(t) {
		err := c.eachPiece(a, func(b []byte) error {
			_, err := w.Write(b)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Load decodes a tensor at the level load of section 9.
func (c *Container) Load(t *Tensor, w io.Writer) error {
	return c.decode(t, w, false)
}

// putWeight joins exponent and sign/mantissa byte (6.3).
func putWeight(out []byte, exponent, signMantissa byte) {
	s := uint16(signMantissa)
	binary.LittleEndian.PutUint16(out, (s&0x80)<<8|uint16(exponent)<<7|s&0x7F)
}
