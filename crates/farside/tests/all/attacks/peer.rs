//! A client of an engine whose datagrams the tests build by hand.

use crate::attacks::bytes::*;
use crate::support::raw_ring::Ring;
#[cfg(feature = "verbs")]
use farside_fabrics::session::carrier::Datagrams;
#[cfg(feature = "verbs")]
use farside_fabrics::verbs::{Choice, VerbsLine};
#[cfg(feature = "verbs")]
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

/// Deadline of a response.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Time to wait before concluding that no response comes.
pub(crate) const SILENCE: Duration = Duration::from_millis(150);

/// A connection that carries datagrams. Over a stream or a ring, each datagram is a frame.
pub(crate) enum Raw {
    Udp(UdpSocket),
    Tcp(TcpStream, Vec<u8>),
    Ring(Ring),
    #[cfg(feature = "verbs")]
    Verbs(Box<VerbsLine>, VecDeque<Vec<u8>>),
}

impl Raw {
    /// Connects to the engine at a `udp://`, `tcp://` or `ring:` url.
    #[track_caller]
    pub(crate) fn connect(url: &str) -> Raw {
        if let Some(path) = url.strip_prefix("ring:") {
            return Raw::Ring(Ring::join(Path::new(path)));
        }
        let (scheme, address) = url.split_once("://").expect("a url");
        let address: SocketAddr = address.parse().expect("an address");
        match scheme {
            "udp" => {
                let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
                socket.connect(address).expect("an address");
                Raw::Udp(socket)
            }
            "tcp" => {
                let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("a listener");
                stream.set_nodelay(true).expect("a stream");
                stream.set_write_timeout(Some(PATIENCE)).expect("a stream");
                Raw::Tcp(stream, Vec::new())
            }
            #[cfg(feature = "verbs")]
            "verbs" => {
                let line = VerbsLine::connect(address, &Choice::default());
                Raw::Verbs(Box::new(line.unwrap_or_else(|error| panic!("{error}"))), VecDeque::new())
            }
            scheme => panic!("unknown carrier {scheme}"),
        }
    }

    pub(crate) fn is_reliable(&self) -> bool {
        !matches!(self, Raw::Udp(_))
    }

    /// Sends a datagram. Returns false if the other end has hung up.
    pub(crate) fn send(&self, datagram: &[u8]) -> bool {
        match self {
            Raw::Udp(socket) => {
                socket.send(datagram).expect("loopback carries it");
                true
            }
            Raw::Tcp(stream, _) => {
                let frame = [&(datagram.len() as u32).to_le_bytes()[..], datagram].concat();
                (&*stream).write_all(&frame).is_ok()
            }
            Raw::Ring(ring) => ring.send(datagram),
            #[cfg(feature = "verbs")]
            Raw::Verbs(line, _) => line.send(datagram).and_then(|()| line.flush()).is_ok(),
        }
    }

    /// Waits for the next datagram; `None` after `wait`, or if the other end hung up.
    pub(crate) fn receive(&mut self, wait: Duration) -> Option<Vec<u8>> {
        if let Raw::Ring(ring) = self {
            return ring.receive(wait);
        }
        #[cfg(feature = "verbs")]
        if let Raw::Verbs(line, inbox) = self {
            let until = Instant::now() + wait;
            loop {
                let received = line.receive(|datagram| inbox.push_back(datagram.to_vec()));
                if let Some(first) = inbox.pop_front() {
                    return Some(first);
                }
                if received.is_err() || line.flush().is_err() || Instant::now() >= until {
                    return None;
                }
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let until = Instant::now() + wait;
        let mut buffer = vec![0; 70_000];
        loop {
            if let Raw::Tcp(_, inbox) = self
                && inbox.len() >= 4
                && inbox.len() >= 4 + u32_at(inbox, 0) as usize
            {
                let rest = inbox.split_off(4 + u32_at(inbox, 0) as usize);
                return Some(std::mem::replace(inbox, rest).split_off(4));
            }
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let read = match self {
                Raw::Udp(socket) => {
                    socket.set_read_timeout(Some(left)).expect("a time");
                    socket.recv(&mut buffer)
                }
                Raw::Tcp(stream, _) => {
                    stream.set_read_timeout(Some(left)).expect("a time");
                    stream.read(&mut buffer)
                }
                Raw::Ring(_) => unreachable!("rings return above"),
                #[cfg(feature = "verbs")]
                Raw::Verbs(..) => unreachable!("lines return above"),
            };
            match (read, &mut *self) {
                (Ok(len), Raw::Udp(_)) => return Some(buffer[..len].to_vec()),
                (Ok(len @ 1..), Raw::Tcp(_, inbox)) => inbox.extend_from_slice(&buffer[..len]),
                (Ok(_), _) => return None,
                (Err(error), _) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= until {
                        return None;
                    }
                }
                (Err(_), _) => return None,
            }
        }
    }

    /// Whether the other end hangs up within `wait`. Reads earlier datagrams and ignores them.
    pub(crate) fn is_hung_up(&mut self, wait: Duration) -> bool {
        let stream = match self {
            Raw::Tcp(stream, _) => stream,
            Raw::Ring(ring) => return ring.hangs_up_within(wait),
            #[cfg(feature = "verbs")]
            Raw::Verbs(line, _) => {
                let until = Instant::now() + wait;
                while line.receive(|_| {}).and_then(|_| line.flush()).is_ok() {
                    if Instant::now() >= until {
                        return false;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                return true;
            }
            Raw::Udp(_) => panic!("udp has no connection to hang up"),
        };
        let until = Instant::now() + wait;
        let mut buffer = vec![0; 70_000];
        while Instant::now() < until {
            stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a time");
            match stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// A client's session, driven by hand.
pub(crate) struct Session {
    pub(crate) raw: Raw,
    pub(crate) number: u32,
    pub(crate) secret: u64,
    /// The HELLO that opened the session.
    pub(crate) hello: Vec<u8>,
    /// The last used number of each slot.
    pub(crate) numbers: [u32; 64],
    /// Fragments of the reply that is being received.
    parts: Vec<Option<Vec<u8>>>,
}

pub(crate) fn random() -> u64 {
    getrandom::u64().expect("the system has random bytes")
}

impl Session {
    #[track_caller]
    pub(crate) fn open(url: &str) -> Session {
        Session::over(Raw::connect(url))
    }

    #[track_caller]
    pub(crate) fn over(mut raw: Raw) -> Session {
        let nonce = random();
        let hello = hello(u128::from(random()) << 64 | 1, 1, nonce, b"");
        let until = Instant::now() + PATIENCE;
        let welcome = loop {
            assert!(Instant::now() < until && raw.send(&hello), "no welcome");
            let wait = if raw.is_reliable() { PATIENCE } else { Duration::from_millis(300) };
            match raw.receive(wait) {
                Some(welcome) if welcome[3] == WELCOME && u64_at(&welcome, 8) == nonce => break welcome,
                Some(other) => assert_ne!(other[3], REFUSED, "{}", other.escape_ascii()),
                None => {}
            }
        };
        let (secret, number) = (u64_at(&welcome, 24), u32_at(&welcome, 48));
        Session { raw, number, secret, hello, numbers: [0; 64], parts: Vec::new() }
    }

    pub(crate) fn datagram(&self, kind: u8, body: &[u8]) -> Vec<u8> {
        datagram(kind, self.number, self.secret, body)
    }

    pub(crate) fn say(&self, kind: u8) -> bool {
        self.raw.send(&self.datagram(kind, &[]))
    }

    pub(crate) fn data(&self, given: &[Entry<'_>]) -> bool {
        self.raw.send(&self.datagram(DATA, &entries(given)))
    }

    /// Sends a PING and waits for its PONG, which shows that the engine has processed all earlier datagrams. Returns
    /// false if the session is over.
    #[track_caller]
    pub(crate) fn sync(&mut self) -> bool {
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "no PONG");
            if !self.say(PING) {
                return false;
            }
            // Only a PONG shows that the engine has processed all earlier datagrams.
            while let Some(bytes) = self.raw.receive(Duration::from_millis(300)) {
                match bytes[3] {
                    PONG if u32_at(&bytes, 4) == self.number => return true,
                    GONE if u32_at(&bytes, 4) == self.number => return false,
                    _ => {}
                }
            }
        }
    }

    /// Keeps the session alive, and asserts that it is.
    #[track_caller]
    pub(crate) fn keep_alive(&mut self) {
        assert!(self.sync(), "the session is alive");
    }

    /// Sends a request of any length with the next number of a slot; returns the number.
    pub(crate) fn request(&mut self, kind: u8, slot: u8, message: &[u8]) -> u32 {
        self.numbers[usize::from(slot)] = self.numbers[usize::from(slot)].wrapping_add(1);
        let number = self.numbers[usize::from(slot)];
        self.send_again(kind, slot, number, message);
        number
    }

    pub(crate) fn send_again(&self, kind: u8, slot: u8, number: u32, message: &[u8]) {
        for index in 0..message.len().div_ceil(CHUNK).max(1) {
            let part = match message.len() {
                ..=CHUNK => Entry::whole(kind, slot, number, message),
                _ => Entry::part(kind, slot, number, message, index),
            };
            self.data(&[part]);
        }
    }

    /// Waits for the reply to the request `number` in `slot`; returns the reply without its execution number. `None`
    /// after `wait`, or if the session is over.
    pub(crate) fn reply(&mut self, slot: u8, number: u32, wait: Duration) -> Option<Vec<u8>> {
        let until = Instant::now() + wait;
        self.parts.clear();
        while Instant::now() < until {
            let bytes = self.raw.receive(until.saturating_duration_since(Instant::now()))?;
            if bytes[3] == GONE {
                return None;
            }
            if bytes[3] != DATA || u32_at(&bytes, 4) != self.number {
                continue;
            }
            let mut rest = &bytes[HEADER..];
            while rest.len() >= 16 {
                let (kind, at, index, count) = (rest[0], rest[1], rest[2], rest[3]);
                let (of, len) = (u32_at(rest, 4), u32_at(rest, 8) as usize);
                let payload = &rest[16..16 + len];
                rest = &rest[16 + len.next_multiple_of(8)..];
                if (kind, at, of) != (REPLY, slot, number) {
                    continue;
                }
                self.parts.resize(count.into(), None);
                self.parts[usize::from(index)] = Some(payload.to_vec());
            }
            if self.parts.is_empty() {
                continue;
            }
            let missing = self.parts.iter().enumerate().filter(|(_, part)| part.is_none());
            let want = missing.fold(0, |bits, (index, _)| bits | 1_u64 << index);
            let have = ((1_u128 << self.parts.len()) - 1) as u64 & !want;
            if want == 0 {
                return Some(self.parts.drain(..).flatten().flatten().skip(8).collect());
            }
            let body = [have.to_le_bytes(), want.to_le_bytes()].concat();
            self.data(&[Entry::whole(HAVE, slot, number, &body)]);
        }
        None
    }

    /// Sends a request and waits for its reply. Resends lost datagrams.
    #[track_caller]
    pub(crate) fn round_trip(&mut self, kind: u8, slot: u8, message: &[u8]) -> Vec<u8> {
        let number = self.request(kind, slot, message);
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(reply) = self.reply(slot, number, Duration::from_millis(700)) {
                return reply;
            }
            assert!(Instant::now() < until, "no reply");
            if !self.raw.is_reliable() {
                self.send_again(kind, slot, number, message);
            }
        }
    }

    #[track_caller]
    pub(crate) fn chain(&mut self, key: (u32, u64), ops: &[Op]) -> ChainReply {
        let reply = self.round_trip(CHAIN, 0, &chain(key, ops));
        ChainReply::of(&reply, ops.len())
    }

    /// Calls the node's own service; returns the answer, or the reason of a refusal.
    #[track_caller]
    pub(crate) fn call(&mut self, question: &str) -> Result<serde_json::Value, String> {
        self.call_service(0, question)
    }

    /// Calls a service whose answers are JSON; returns the answer, or the reason of a refusal.
    #[track_caller]
    pub(crate) fn call_service(&mut self, service: u32, question: &str) -> Result<serde_json::Value, String> {
        let service = u64::from(service).to_le_bytes();
        let answer = self.round_trip(CALL, 0, &[&service, question.as_bytes()].concat());
        match answer[0] {
            0 => Ok(serde_json::from_slice(&answer[1..]).expect("an answer is JSON")),
            0xff => Err(String::from_utf8(answer[1..].to_vec()).expect("a reason is text")),
            first => panic!("unexpected first byte {first}"),
        }
    }

    /// Creates a PRISM-KV store with a quota in bytes.
    #[track_caller]
    pub(crate) fn create(&mut self, name: &str, quota: u64) {
        let parameters = r#""{\"items\":100,\"placement\":\"hashed\"}""#;
        let of = format!(r#""name":"{name}","kind":"prism-kv","quota":{quota},"parameters":{parameters}"#);
        self.call(&format!(r#"{{"create_store":{{{of}}}}}"#)).expect("the node has memory");
    }

    /// Opens a store; returns its key and table.
    #[track_caller]
    pub(crate) fn store(&mut self, name: &str) -> Store {
        let answer =
            self.call(&format!(r#"{{"open_store":{{"name":"{name}"}}}}"#)).expect("the store exists");
        let field = |name: &str| answer["store"][name].as_u64().expect("a number");
        Store {
            key: (field("region") as u32, field("secret")),
            table_at: field("table_at"),
            table_len: field("table_len"),
        }
    }

    /// Allocates a buffer that holds these bytes; returns the buffer's address.
    #[track_caller]
    pub(crate) fn buffer(&mut self, store: &Store, bytes: &[u8]) -> u64 {
        let list = list_for(bytes.len());
        let reply = self.chain(store.key, &[allocate(list, bytes)]);
        assert_eq!(reply.statuses(), [OK]);
        u64_at(reply.output(0), 0)
    }
}

/// A store, with the key that one session got for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    pub(crate) key: (u32, u64),
    pub(crate) table_at: u64,
    pub(crate) table_len: u64,
}

/// Returns the number of the free list whose buffers hold `len` bytes.
pub(crate) fn list_for(len: usize) -> u64 {
    let class = farside_remote::arena::class::Class::for_len(len).expect("a size class for the length");
    class.list().0.into()
}
