// Gremlin makes a host misbehave for the tests.
//
//	gremlin fuse DIR      mounts a file system with one file, DIR/hang. A read
//	                      of it never returns, and whoever reads cannot be
//	                      killed, until SIGUSR1: from then on it is an empty file
//	gremlin deaf SOCKET   listens on a Unix socket, accepts and never answers
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: gremlin fuse DIR | deaf SOCKET")
	}
	switch os.Args[1] {
	case "fuse":
		fuse(os.Args[2])
	case "deaf":
		deaf(os.Args[2])
	default:
		log.Fatalf("gremlin: no such trick: %s", os.Args[1])
	}
}

func deaf(path string) {
	os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	var held []net.Conn // kept: a closed one would be an answer
	for {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err, len(held))
		}
		held = append(held, c)
	}
}

// What of FUSE's protocol is spoken here (linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opFlush       = 25
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opInterrupt   = 36
	opBatchForget = 42

	directIO = 1 // a read of the file is a request, and no page of the cache
	hangNode = 2
)

type inHeader struct {
	Len, Op       uint32
	Unique, Node  uint64
	UID, GID, PID uint32
	_             uint32
}

type attr struct {
	Ino, Size, Blocks, Atime, Mtime, Ctime                                         uint64
	AtimeNsec, MtimeNsec, CtimeNsec, Mode, Nlink, UID, GID, Rdev, BlockSize, Flags uint32
}

func attrOf(node uint64) attr {
	if node == hangNode {
		return attr{Ino: node, Size: 4096, Mode: syscall.S_IFREG | 0o444, Nlink: 1, BlockSize: 4096}
	}
	return attr{Ino: 1, Mode: syscall.S_IFDIR | 0o755, Nlink: 2, BlockSize: 4096}
}

func fuse(dir string) {
	fd, err := syscall.Open("/dev/fuse", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		log.Fatal("opening /dev/fuse: ", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)
	if err := syscall.Mount("gremlin", dir, "fuse", syscall.MS_NOSUID|syscall.MS_NODEV, options); err != nil {
		log.Fatal("mounting: ", err)
	}

	reply := func(unique uint64, errno syscall.Errno, body any) {
		var b bytes.Buffer
		if body != nil {
			_ = binary.Write(&b, binary.LittleEndian, body)
		}
		var out bytes.Buffer
		_ = binary.Write(&out, binary.LittleEndian, struct {
			Len    uint32
			Error  int32
			Unique uint64
		}{uint32(16 + b.Len()), -int32(errno), unique})
		out.Write(b.Bytes())
		_, _ = syscall.Write(fd, out.Bytes()) // refused when the asker is gone
	}

	var mu sync.Mutex
	var pending []uint64
	released := false
	release := make(chan os.Signal, 1)
	signal.Notify(release, syscall.SIGUSR1)
	go func() {
		for range release {
			mu.Lock()
			for _, u := range pending {
				reply(u, 0, nil)
			}
			pending, released = nil, true
			mu.Unlock()
		}
	}()

	buf := make([]byte, 1<<20)
	for {
		n, err := syscall.Read(fd, buf)
		if err == syscall.EINTR || err == syscall.ENOENT || err == syscall.EAGAIN {
			continue
		}
		if err != nil {
			log.Fatal("reading requests: ", err)
		}
		var h inHeader
		if err := binary.Read(bytes.NewReader(buf[:n]), binary.LittleEndian, &h); err != nil {
			log.Fatal("reading a request: ", err)
		}
		body := buf[binary.Size(h):n]
		switch h.Op {
		case opInit:
			reply(h.Unique, 0, struct {
				Major, Minor, Readahead, Flags uint32
				Background, Congestion         uint16
				MaxWrite, TimeGran             uint32
				MaxPages, MapAlignment         uint16
				_                              [8]uint32
			}{Major: 7, Minor: 31, Background: 16, Congestion: 12, MaxWrite: 4096, TimeGran: 1})
		case opLookup:
			if string(bytes.TrimRight(body, "\x00")) != "hang" {
				reply(h.Unique, syscall.ENOENT, nil)
				continue
			}
			reply(h.Unique, 0, struct {
				Node, Generation, EntryValid, AttrValid uint64
				EntryNsec, AttrNsec                     uint32
				Attr                                    attr
			}{Node: hangNode, EntryValid: 60, AttrValid: 60, Attr: attrOf(hangNode)})
		case opGetattr:
			reply(h.Unique, 0, struct {
				Valid uint64
				Nsec  uint32
				_     uint32
				Attr  attr
			}{Valid: 60, Attr: attrOf(h.Node)})
		case opOpen, opOpendir:
			reply(h.Unique, 0, struct {
				Handle   uint64
				Flags, _ uint32
			}{Flags: directIO})
		case opRead:
			mu.Lock()
			if released {
				reply(h.Unique, 0, nil)
			} else {
				pending = append(pending, h.Unique)
			}
			mu.Unlock()
		case opStatfs:
			reply(h.Unique, 0, [80]byte{})
		case opReaddir, opRelease, opReleasedir, opFlush:
			reply(h.Unique, 0, nil)
		case opForget, opBatchForget, opInterrupt: // no answer is wanted
		default:
			reply(h.Unique, syscall.ENOSYS, nil)
		}
	}
}
