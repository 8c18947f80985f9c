// Package df11 reads df11 containers, version 1.0: it opens, loads, verifies
// and restores them. Numbers in comments are sections of format.md.
package df11

import "math"

// Constants of section 1.
const (
	magic             = "\xDF\x44\x46\x31\x31\x0D\x0A\x1A"
	versionMajor      = 1
	headBytes         = 4096
	headerBytes       = 64
	sectionAlignment  = 4096
	arrayAlignment    = 256
	chunkBytes        = 1048576
	maxDirectoryBytes = 268435456
	maxFileBytes      = math.MaxInt64
	maxNameBytes      = 4096
	maxComponentBytes = 255
	maxPathComponents = 32
	maxFiles          = 10000
	maxFolders        = 10000
	maxAliases        = 15
	maxKeyBytes       = 255
	maxValueBytes     = 65536
	maxMetadataBytes  = 1048576
	maxDimensions     = 8
	maxShards         = 100000
	maxCodeLength     = 16
	none              = math.MaxUint64
)

// Kinds of files (3, File).
const (
	FileWeights = 0
	FileSide    = 1
	FileBeside  = 2
)

// Kinds of sections (3, Section).
const (
	sectionCodebook  = 1
	sectionIndex     = 2
	sectionBitstream = 3
	sectionPlane     = 4
	sectionRaw       = 5
	sectionPrefix    = 6
	sectionSide      = 7
	sectionSkippable = 1 << 31 // kinds from here on are ignored if unknown
)

// Encodings (6).
const (
	encodingAlias = 0
	encodingRaw   = 1
	encodingGap   = 2
	encodingTile  = 3
)
