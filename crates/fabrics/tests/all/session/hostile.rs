//! Malicious datagrams to both ends. They are encoded here from the documented format, by code that is independent of
//! the crate under test.
//!
//! The tests check that nothing panics, that no request runs that no client made, and that memory is bounded.

use crate::session::world::{MS, Order, Runner, World, seeds};
use crate::session::{client, open, order, server};
use farside_fabrics::session::packet::PacketError;
use farside_fabrics::session::{self, client::Client, client::Event, server::Server};
use farside_remote::Addr;
use farside_remote::draws::Draws;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use std::time::Duration;

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REFUSED: u8 = 3;
const DATA: u8 = 4;
const PING: u8 = 5;
const GONE: u8 = 8;
const CHAIN: u8 = 1;
const CALL: u8 = 2;
const RETIRE: u8 = 3;
const REPLY: u8 = 4;
const HAVE: u8 = 5;

const DATAGRAM: usize = 1200;
const CHUNK: usize = 1160;

/// Writes the correct checksum into a datagram.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= 24 {
        let secrets = RapidSecrets::seed(0x6661_7273_6964_6501);
        let mut head = bytes[..16].to_vec();
        head.extend_from_slice(&rapidhash_v3_seeded(&bytes[24..], &secrets).to_le_bytes());
        let check = rapidhash_v3_seeded(&head, &secrets);
        bytes[16..24].copy_from_slice(&check.to_le_bytes());
    }
    bytes
}

fn datagram(kind: u8, session: u32, secret: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"Fs\x02".to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(&session.to_le_bytes());
    bytes.extend_from_slice(&secret.to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(body);
    sealed(bytes)
}

#[derive(Clone, Copy)]
struct Entry<'a> {
    kind: u8,
    slot: u8,
    index: u8,
    count: u8,
    number: u32,
    len: u32,
    size: u32,
    payload: &'a [u8],
}

impl Entry<'_> {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![self.kind, self.slot, self.index, self.count];
        for word in [self.number, self.len, self.size] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(self.payload);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }
}

fn whole(kind: u8, slot: u8, number: u32, payload: &[u8]) -> Entry<'_> {
    let len = payload.len() as u32;
    Entry { kind, slot, index: 0, count: 1, number, len, size: len, payload }
}

/// A server with one session, whose client is this test.
struct Victim {
    server: Server<usize, Runner>,
    host: Runner,
    session: u32,
    secret: u64,
    out: Vec<u8>,
}

fn hello(identity: u128, incarnation: u64, nonce: u64) -> Vec<u8> {
    hello_of(identity, incarnation, nonce, DATAGRAM)
}

/// Returns a HELLO with the datagram limit `limit`.
fn hello_of(identity: u128, incarnation: u64, nonce: u64, limit: usize) -> Vec<u8> {
    let mut body = identity.to_le_bytes().to_vec();
    for word in [incarnation, 0] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    for word in [limit as u32, 1 << 20, 3, 0] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    body.extend_from_slice(b"abc");
    body.resize(DATAGRAM - 24, 0);
    datagram(HELLO, 0, nonce, &body)
}

impl Victim {
    fn new() -> Victim {
        Victim::of(DATAGRAM, 65600)
    }
    /// Creates a server whose client has requested the datagram limit `limit`.
    fn of(limit: usize, assembly_bytes: usize) -> Victim {
        let config = session::server::Config { sessions_max: 4, assembly_bytes, ..server() };
        let mut victim = Victim {
            server: Server::new(config),
            host: Runner::default(),
            session: 0,
            secret: 0,
            out: Vec::new(),
        };
        victim.receive(&hello_of(1, 1, 77, limit)).expect("a valid hello");
        assert_eq!(victim.server.transmit(&mut victim.out), Some(0));
        let welcome = victim.out.clone();
        assert_eq!((welcome[3], &welcome[8..16]), (WELCOME, &77_u64.to_le_bytes()[..]));
        victim.secret = u64::from_le_bytes(welcome[24..32].try_into().unwrap());
        victim.session = u32::from_le_bytes(welcome[48..52].try_into().unwrap());
        victim
    }
    fn receive(&mut self, bytes: &[u8]) -> Result<(), PacketError> {
        self.server.receive(MS, 0, bytes, &mut self.host)
    }
    fn data(&mut self, entries: &[Entry<'_>]) -> Result<(), PacketError> {
        let body: Vec<u8> = entries.iter().flat_map(Entry::bytes).collect();
        self.receive(&datagram(DATA, self.session, self.secret, &body))
    }
    fn runs(&self) -> u64 {
        self.server.counters().executed
    }
    /// Returns the queued responses as datagrams.
    fn answers(&mut self) -> Vec<Vec<u8>> {
        let mut answers = Vec::new();
        while self.server.transmit(&mut self.out).is_some() {
            answers.push(self.out.clone());
            assert!(answers.len() < 10_000, "the server responds for ever");
        }
        answers
    }
}

#[test]
fn have_entries_may_fill_a_datagram_to_its_last_byte() {
    const SLOTS: u8 = 64;
    for limit in (1200..2200).step_by(8) {
        let mut victim = Victim::of(limit, 1 << 20);
        let first = vec![0; (limit - 40) & !7];
        let (len, size) = (first.len() as u32, first.len() as u32 + 800);
        for slot in 0..SLOTS {
            victim
                .data(&[Entry { size, len, count: 2, ..whole(CALL, slot, 1, &first) }])
                .expect("a fragment");
        }
        let reported: usize = victim.answers().iter().map(|answer| (answer.len() - 24) / 32).sum();
        assert_eq!(reported, usize::from(SLOTS), "datagrams of {limit} bytes");
    }
}

#[test]
fn a_truncated_or_damaged_datagram_has_no_effect() {
    let mut victim = Victim::new();
    let (one, two) = (order(1).encode(), order(2).encode());
    let body = [whole(CHAIN, 0, 1, &one).bytes(), whole(CHAIN, 1, 1, &two).bytes()].concat();
    let good = datagram(DATA, victim.session, victim.secret, &body);
    for cut in 0..good.len() {
        assert!(victim.receive(&good[..cut]).is_err(), "cut to {cut}");
        if cut > 24 {
            // It may be a valid shorter datagram.
            assert!(victim.receive(&sealed(good[..cut].to_vec())).is_err() || cut == 24 + body.len() / 2);
        }
    }
    let ran = victim.runs();
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bad = good.clone();
            bad[at] ^= 1 << bit;
            assert!(victim.receive(&bad).is_err(), "bit {bit} of byte {at}");
        }
    }
    for more in 1..32 {
        let mut bad = good.clone();
        bad.resize(good.len() + more, 0);
        assert!(victim.receive(&bad).is_err());
        assert!(victim.receive(&sealed(bad)).is_err());
    }
    assert_eq!(victim.runs(), ran);
    // The unchanged datagram is valid, so only the damage made the others invalid.
    victim.receive(&good).expect("the original is valid");
    assert_eq!((victim.runs(), victim.host.runs.len()), (2, 2));
}

#[test]
fn a_datagram_with_a_wrong_secret_has_no_effect() {
    let mut victim = Victim::new();
    let bytes = order(1).encode();
    let body = whole(CHAIN, 0, 1, &bytes).bytes();
    let (session, secret) = (victim.session, victim.secret);
    for bit in 0..64 {
        for kind in [DATA, PING, 7] {
            let bad = datagram(kind, session, secret ^ 1 << bit, if kind == DATA { &body } else { &[] });
            assert_eq!(victim.receive(&bad), Err(PacketError::Secret));
        }
    }
    assert_eq!(victim.server.counters().bad_secrets, 64 * 3);
    assert_eq!((victim.runs(), victim.server.sessions()), (0, 1));
    assert!(victim.answers().is_empty());
    // A datagram with the right secret from another address is ignored, too.
    let good = datagram(DATA, session, secret, &body);
    let _ = victim.server.receive(MS, 9, &good, &mut victim.host);
    assert_eq!((victim.runs(), victim.server.counters().refused), (0, 1));
    // A tombstone is only reported to a sender with the right secret.
    victim.receive(&datagram(7, session, secret, &[])).expect("a valid bye");
    assert_eq!(victim.receive(&datagram(DATA, session, secret ^ 1, &body)), Err(PacketError::Secret));
    assert!(victim.answers().is_empty());
    assert_eq!(victim.receive(&good), Err(PacketError::Session(session)));
    assert_eq!(victim.answers().len(), 1);
}

#[test]
fn an_invalid_entry_runs_nothing() {
    let mut victim = Victim::new();
    let bytes = order(1).encode();
    let big = vec![0; CHUNK];
    let good = whole(CHAIN, 0, 1, &bytes);
    let part = Entry { count: 3, len: CHUNK as u32, size: 3000, payload: &big, ..good };
    let bad = [
        Entry { kind: 0, ..good },
        Entry { kind: 9, ..good },
        Entry { kind: 255, ..good },
        Entry { slot: 64, ..good },
        Entry { slot: 255, ..good },
        Entry { count: 0, ..good },
        Entry { count: 2, ..good },
        Entry { count: 255, ..good },
        Entry { index: 1, ..good },
        Entry { index: 255, count: 255, ..good },
        Entry { len: 0, ..good },
        Entry { len: 41, ..good },
        Entry { len: u32::MAX, ..good },
        Entry { len: u32::MAX - 6, ..good },
        Entry { size: 0, ..good },
        Entry { size: u32::MAX, ..good },
        Entry { size: 1 << 20, ..part },
        Entry { count: 64, size: 64 * CHUNK as u32, ..part },
        Entry { count: 2, ..part },
        Entry { index: 3, ..part },
        Entry { index: 2, ..part },
        Entry { size: 4000, ..part },
        whole(RETIRE, 0, 1, &bytes[..23]),
        whole(CALL, 0, 1, &bytes[..7]),
        whole(HAVE, 0, 1, &bytes[..8]),
        whole(6, 0, 1, &bytes[..8]),
        // These kinds existed in an earlier version.
        whole(7, 0, 1, &[]),
        whole(8, 0, 1, &[]),
    ];
    for (at, entry) in bad.iter().enumerate() {
        assert!(victim.data(&[*entry]).is_err(), "entry {at}");
        // The valid entry before the invalid one has no effect either.
        assert!(victim.data(&[good, *entry]).is_err(), "entry {at} after a valid one");
    }
    assert!(victim.host.expected.is_empty(), "no invalid entry is prefetched");
    assert_eq!(victim.server.counters().malformed, 2 * bad.len() as u64);
    // These entries are well-formed, but not allowed.
    let not_allowed = [
        Entry { number: 2, ..good },
        Entry { number: 1 << 30, ..good },
        Entry { number: (1 << 31) - 1, ..good },
        whole(HAVE, 0, 1, &bytes[..16]),
        whole(REPLY, 0, 1, &bytes),
        whole(6, 0, 2, &[]),
    ];
    for (at, entry) in not_allowed.iter().enumerate() {
        let before = victim.server.counters().refused;
        victim.data(&[*entry]).expect("a well-formed entry");
        assert_eq!(victim.server.counters().refused, before + 1, "entry {at}");
    }
    victim.data(&[Entry { number: u32::MAX, ..good }]).expect("a well-formed entry");
    assert_eq!(victim.server.counters().stale, 1, "a number from before the first");
    assert_eq!(victim.runs(), 0);
    for kind in [WELCOME, REFUSED, 6, GONE, 0, 9, 255] {
        let session = (victim.session, victim.secret);
        assert_eq!(victim.receive(&datagram(kind, session.0, session.1, &[])), Err(PacketError::Kind(kind)));
    }
    // Fragments that contradict the first one of their number.
    victim.data(&[part]).expect("a valid fragment");
    for entry in [
        Entry { index: 1, size: 2999, ..part },
        Entry { index: 1, kind: CALL, ..part },
        Entry { number: 2, ..part },
    ] {
        let before = victim.server.counters().refused;
        victim.data(&[entry]).expect("a well-formed entry");
        assert_eq!(victim.server.counters().refused, before + 1);
    }
    assert_eq!(victim.runs(), 0);
}

#[test]
fn a_refusal_of_another_version_names_both_versions() {
    let mut victim = Victim::new();
    let mut bytes = hello(5, 1, 9);
    bytes[2] = 3;
    assert_eq!(victim.receive(&bytes), Err(PacketError::Version(3)));
    let answers = victim.answers();
    let text = String::from_utf8_lossy(&answers[0][24..]).into_owned();
    assert_eq!(answers[0][3], REFUSED);
    assert!(text.contains("version 3") && text.contains("speaks 2"), "{text}");
    let mut short = bytes.clone();
    short.truncate(1199);
    assert!(
        victim.receive(&short).is_err() && victim.answers().is_empty(),
        "a forged source address gains no amplification"
    );
    bytes[0] = b'X';
    let error = victim.receive(&bytes).unwrap_err().to_string();
    assert!(error.contains("0x7358") && error.contains("0x7346"), "{error}");
    // A client that connects to a node of another version.
    let mut client = Client::new(MS, session::client::Config { nonce: 77, ..client(1, 1) });
    let mut refused = datagram(REFUSED, 0, 77, b"?");
    refused[2] = 9;
    let _ = client.receive(MS, &refused);
    let Some(Event::Refused(reason)) = client.next_event() else { panic!("no reason") };
    assert!(reason.contains("version 9") && reason.contains("speaks 2"), "{reason}");
}

#[test]
fn the_same_hello_gets_the_same_welcome_another_is_refused() {
    let mut victim = Victim::new();
    victim.receive(&hello(1, 1, 77)).expect("well-formed");
    let again = victim.answers().remove(0);
    assert_eq!(again[24..32], victim.secret.to_le_bytes());
    assert_eq!((victim.host.opened, victim.server.sessions()), (1, 1));
    let mut other = hello(1, 1, 77);
    other[24 + 48] ^= 1; // A byte of the token.
    victim.receive(&sealed(other)).expect("well-formed");
    assert_eq!(victim.answers().remove(0)[3], REFUSED);
    assert_eq!(victim.server.receive(MS, 3, &hello(1, 1, 77), &mut victim.host), Ok(()));
    assert_eq!(
        victim.answers().remove(0)[3],
        REFUSED,
        "a welcome to another address would reveal the secret"
    );
    assert_eq!((victim.host.opened, victim.server.sessions()), (1, 1));
    // A refused hello of a higher incarnation does not end the session.
    victim.host.refuse = Some("a wrong token".into());
    victim.receive(&hello(1, 2, 78)).expect("well-formed");
    assert_eq!((victim.host.closed.len(), victim.server.sessions()), (0, 1));
}

#[test]
fn a_repeated_request_gets_its_reply_again_and_runs_once() {
    let mut victim = Victim::new();
    let bytes = order(1).encode();
    victim.data(&[whole(CHAIN, 5, 1, &bytes)]).unwrap();
    let first = victim.answers();
    for _ in 0..100 {
        victim.data(&[whole(CHAIN, 5, 1, &bytes)]).unwrap();
        assert_eq!(victim.answers(), first);
        assert!(victim.host.expected.is_empty(), "a repeated request is not prefetched");
    }
    victim.data(&[whole(CHAIN, 5, 2, &order(2).encode())]).unwrap();
    victim.answers();
    victim.data(&[whole(CHAIN, 5, 1, &bytes)]).unwrap();
    assert!(victim.answers().is_empty(), "an older request gets no response");
    assert_eq!((victim.runs(), victim.server.counters().stale), (2, 1));
}

#[test]
fn a_peer_that_ignores_its_grants_uses_bounded_memory() {
    let mut victim = Victim::new();
    let big = vec![0; CHUNK];
    let size = 65_536_u32;
    let count = size.div_ceil(CHUNK as u32) as u8;
    for round in 0..3 {
        for slot in 0..64 {
            for index in 0..count - 1 {
                let len = CHUNK as u32;
                let part = Entry { kind: CHAIN, slot, index, count, number: 1, len, size, payload: &big };
                victim.data(&[part]).unwrap();
            }
        }
        assert!(victim.server.kept_bytes() < 300_000, "round {round}: {}", victim.server.kept_bytes());
    }
    assert!(victim.server.counters().refused > 0);
    assert_eq!(victim.runs(), 0);
    // Sessions, tombstones and responses to strangers are bounded, too.
    for identity in 0..10_000 {
        let _ = victim.server.receive(MS, 5, &hello(identity + 2, 1, 1), &mut victim.host);
        let _ = victim.receive(&datagram(DATA, identity as u32, 5, &[]));
    }
    assert!(victim.server.sessions() <= 4 && victim.server.kept_bytes() < 600_000);
    assert!(victim.answers().len() < 200);
    for incarnation in 2..2000 {
        let _ = victim.receive(&hello(1, incarnation, 1));
    }
    assert!(victim.server.sessions() <= 4 && victim.server.kept_bytes() < 600_000);
}

/// Returns a nearly valid datagram.
fn nearly(rng: &mut Draws, session: u32, secret: u64, payload: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for _ in 0..rng.below(4) {
        let size = [0, 8, 16, 24, 40, 1160, 1161, 3000, 65536][rng.below(9) as usize];
        let count = (size as usize).div_ceil(CHUNK).max(1) as u8;
        let index = rng.below(u64::from(count)) as u8;
        let len = CHUNK.min(size as usize - usize::from(index) * CHUNK) as u32;
        let (kind, slot, number) = (1 + rng.below(8) as u8, rng.below(4) as u8, rng.below(6) as u32);
        let payload = &payload[..len as usize];
        body.extend(Entry { kind, slot, index, count, number, len, size, payload }.bytes());
    }
    let kind = if rng.percent(90) { DATA } else { rng.below(10) as u8 };
    if kind != DATA && rng.percent(50) {
        body.clear();
    }
    let mut bytes = datagram(kind, session, secret, &body);
    for _ in 0..rng.below(3) {
        let at = if rng.percent(50) {
            rng.below(bytes.len().min(64) as u64)
        } else {
            rng.below(bytes.len() as u64)
        };
        bytes[at as usize] =
            if rng.percent(50) { rng.next() as u8 } else { [0, 1, 255, 64][rng.below(4) as usize] };
    }
    if rng.percent(10) {
        bytes.truncate(rng.below(bytes.len() as u64) as usize);
    }
    if rng.percent(90) { sealed(bytes) } else { bytes }
}

#[test]
fn a_server_withstands_arbitrary_datagrams() {
    let taken = std::cell::Cell::new(0);
    seeds("a_server_withstands_arbitrary_datagrams", 300, |seed| {
        let mut rng = Draws(seed);
        let mut victim = Victim::new();
        let mut payload = Order { tag: 3, size: CHUNK, reply_size: 65536, later_ms: 0 }.encode();
        // An invalid order would be answered with as many bytes: the pattern would not match.
        payload[8..].fill(0);
        payload[8] = 9;
        victim.host.is_lenient = true;
        for _ in 0..300 {
            let bytes = nearly(&mut rng, victim.session, victim.secret, &payload);
            if victim.receive(&bytes).is_ok() {
                taken.set(taken.get() + 1);
            }
            let answers = victim.answers();
            let sum: usize = answers.iter().map(Vec::len).sum();
            assert!(sum <= 4 * 70_000, "{sum} bytes of responses to one datagram");
            if victim.server.sessions() == 0 {
                break; // A BYE got through.
            }
        }
        assert!(victim.server.kept_bytes() < 1_000_000, "{}", victim.server.kept_bytes());
    });
    assert!(taken.get() > 10_000, "only {} datagrams were well-formed", taken.get());
}

#[test]
fn a_client_withstands_arbitrary_datagrams() {
    let taken = std::cell::Cell::new(0);
    seeds("a_client_withstands_arbitrary_datagrams", 300, |seed| {
        let mut rng = Draws(seed);
        let mut config = client(1, 1);
        config.nonce = 77;
        let mut victim = Client::new(MS, config);
        let mut out = Vec::new();
        let mut body = Vec::new();
        for word in [5_u64, 1, 0] {
            body.extend_from_slice(&word.to_le_bytes());
        }
        for word in [3_u32, DATAGRAM as u32, 1 << 20, 70_000, 20_000] {
            body.extend_from_slice(&word.to_le_bytes());
        }
        body.extend_from_slice(&[4, 2, 0, 0]);
        for _ in 0..20 {
            let mut bad = body.clone();
            for _ in 0..1 + rng.below(3) {
                let at = 24 + rng.below(24) as usize;
                bad[at] = [0, 255, rng.next() as u8][rng.below(3) as usize];
            }
            let _ = victim.receive(MS, &datagram(WELCOME, 0, 78, &body));
            let _ = Client::new(MS, session::client::Config { nonce: 77, ..client(1, 1) })
                .receive(MS, &datagram(WELCOME, 0, 77, &bad));
        }
        assert!(victim.next_event().is_none(), "a forged welcome opens nothing");
        victim.receive(MS, &datagram(WELCOME, 0, 77, &body)).expect("a valid welcome");
        let (mut now, mut held) = (MS, Vec::new());
        let payload: Vec<u8> = (0..CHUNK).map(|_| rng.next() as u8).collect();
        for _ in 0..400 {
            now += Duration::from_micros(rng.below(3000));
            if rng.percent(40) {
                let size = [0, 40, 3000, 65536][rng.below(4) as usize];
                victim.submit(now, session::client::Ask::Chain, &[&vec![1; size]]);
            }
            let mut budget = 500;
            while victim.transmit(now, &mut out) {
                budget -= 1;
                assert!(budget > 0, "the client sends for ever");
            }
            if victim.receive(now, &nearly(&mut rng, 3, 5, &payload)).is_ok() {
                taken.set(taken.get() + 1);
            }
            while let Some(event) = victim.next_event() {
                if let Event::Answered { request, .. } = event {
                    assert!(victim.reply(request).len() <= 65_600);
                    held.push(request);
                }
            }
            if rng.percent(20) {
                let _ = victim.retire(now, &[(1, Addr::new(64))]);
            }
            while !held.is_empty() && rng.percent(30) {
                victim.release(held.swap_remove(rng.below(held.len() as u64) as usize));
            }
            assert!(victim.kept_bytes() < 2_000_000, "{}", victim.kept_bytes());
            assert!(victim.outstanding() <= 1 << 20);
            assert!(victim.next_timeout().is_none_or(|at| at < now + Duration::from_secs(61)));
        }
    });
    assert!(taken.get() > 10_000, "only {} datagrams were well-formed", taken.get());
}

#[test]
fn random_bytes_have_no_effect_on_either_end() {
    let mut rng = Draws(1);
    let mut victim = Victim::new();
    let mut world = World::new(1, server());
    let peer = open(&mut world, client(1, 1));
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..rng.below(100)).map(|_| rng.next() as u8).collect();
        if bytes.len() > 3 && rng.percent(80) {
            bytes[..3].copy_from_slice(b"Fs\x02");
        }
        let bytes = if rng.percent(80) { sealed(bytes) } else { bytes };
        assert!(victim.receive(&bytes).is_err());
        assert!(world.peers[peer].client.receive(MS * 10, &bytes).is_err());
    }
    assert_eq!(victim.runs(), 0);
    assert!(world.peers[peer].client.next_event().is_none());
}
