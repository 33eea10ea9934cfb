//! Impostors of a node, over datagrams, streams and rings: their clients get an error before a deadline.

use crate::attacks::bytes::*;
use crate::attacks::on_each_carrier;
use crate::support::for_each_at_once;
use crate::support::raw_ring::{self, Ring, Side, Word};
use farside::{Error, KvError};
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;

on_each_carrier![
    an_invalid_welcome_is_an_error,
    a_refusal_with_any_bytes_is_reported,
    invalid_responses_are_errors_in_time,
    a_session_that_ends_during_a_call_is_an_error,
    invalid_store_descriptions_are_errors,
    invalid_replies_are_errors_in_time,
];

/// Datagrams with which an impostor responds to one datagram.
type Answers = Vec<Vec<u8>>;

/// An impostor of a node, on a thread that lives as long as the test's process. Dereferences to the impostor's url.
struct Impostor {
    url: String,
    /// Folder of the impostor's socket, if the socket has a path.
    _folder: Option<TempDir>,
}

impl Impostor {
    fn at(url: String) -> Impostor {
        Impostor { url, _folder: None }
    }
}

impl Deref for Impostor {
    type Target = str;

    fn deref(&self) -> &str {
        &self.url
    }
}

fn impostor(carrier: &str, mut answer: impl FnMut(&[u8]) -> Answers + Send + 'static) -> Impostor {
    if carrier == "ring" {
        return ring_impostor(answer);
    }
    if carrier == "udp" {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let url = format!("udp://{}", socket.local_addr().expect("a bound socket"));
        std::thread::spawn(move || {
            let mut buffer = vec![0; 70_000];
            while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                for bytes in answer(&buffer[..len]) {
                    let _lost = socket.send_to(&bytes, from);
                }
            }
        });
        return Impostor::at(url);
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp://{}", listener.local_addr().expect("a bound socket"));
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut len = [0; 4];
            while stream.read_exact(&mut len).is_ok() {
                let mut frame = vec![0; u32::from_le_bytes(len) as usize];
                if stream.read_exact(&mut frame).is_err() {
                    break;
                }
                for bytes in answer(&frame) {
                    let frame = [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat();
                    let _hung_up = stream.write_all(&frame);
                }
            }
        }
    });
    Impostor::at(url)
}

/// Starts an impostor over rings that responds to each frame with the frames of `answer`.
fn ring_impostor(mut answer: impl FnMut(&[u8]) -> Answers + Send + 'static) -> Impostor {
    engine_by_hand(move |ring| {
        while !ring.hangs_up_within(Duration::ZERO) {
            let Some(frame) = ring.receive(Duration::from_millis(100)) else { continue };
            if !answer(&frame).iter().all(|bytes| ring.send(bytes)) {
                break;
            }
        }
    })
}

/// Starts an impostor that welcomes clients one after the other and hands each to `serve`.
fn engine_by_hand(mut serve: impl FnMut(Ring) + Send + 'static) -> Impostor {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ring");
    let listener = raw_ring::listen(&path);
    std::thread::spawn(move || {
        while let Ok(socket) = rustix::net::accept(&listener) {
            Ring::welcome(socket).into_iter().for_each(&mut serve);
        }
    });
    Impostor { url: format!("ring:{}", path.display()), _folder: Some(folder) }
}

/// Returns about the maximum length of a datagram, in bytes. Frames of a ring are shorter.
fn longest(carrier: &str) -> usize {
    if carrier == "ring" { 24_000 } else { 60_000 }
}

/// Asserts that `run` takes less than 8 s. A call's deadline is 1 s; the other 7 s are for slow machines.
#[track_caller]
fn in_time<O>(run: impl FnOnce() -> O) -> O {
    let since = Instant::now();
    let out = run();
    assert!(since.elapsed() < Duration::from_secs(8), "it took {:?}", since.elapsed());
    out
}

#[track_caller]
fn fails_to_connect(url: &str) -> Error {
    in_time(|| farside::connect(url)).expect_err("an impostor")
}

const SESSION: u32 = 3;
const SECRET: u64 = 5;

/// Returns the body of a valid welcome.
fn welcome_body() -> Vec<u8> {
    let mut body = Vec::new();
    for word in [SECRET, 1, 0] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    for word in [SESSION, DATAGRAM as u32, 1 << 20, 70_000, 5000] {
        body.extend_from_slice(&word.to_le_bytes());
    }
    body.extend_from_slice(&[64, 2, 0, 0]);
    body
}

fn welcome(hello: &[u8]) -> Vec<u8> {
    datagram(WELCOME, 0, u64_at(hello, 8), &welcome_body())
}

fn of_session(kind: u8, body: &[u8]) -> Vec<u8> {
    datagram(kind, SESSION, SECRET, body)
}

/// A request that fits into one entry.
struct Request<'a> {
    kind: u8,
    slot: u8,
    number: u32,
    body: &'a [u8],
}

fn requests(datagram: &[u8]) -> Vec<Request<'_>> {
    let mut rest = if datagram.len() > HEADER && datagram[3] == DATA { &datagram[HEADER..] } else { &[] };
    let mut all = Vec::new();
    while rest.len() >= 16 {
        let len = u32_at(rest, 8) as usize;
        if [CHAIN, CALL].contains(&rest[0]) && rest[3] == 1 {
            all.push(Request {
                kind: rest[0],
                slot: rest[1],
                number: u32_at(rest, 4),
                body: &rest[16..16 + len],
            });
        }
        rest = &rest[16 + len.next_multiple_of(8)..];
    }
    all
}

/// Builds a reply, in as many datagrams as necessary.
fn reply(request: &Request<'_>, execution: u64, body: &[u8]) -> Answers {
    let message = [&execution.to_le_bytes()[..], body].concat();
    let part = |index: usize| match message.len() {
        ..=CHUNK => Entry::whole(REPLY, request.slot, request.number, &message),
        _ => Entry::part(REPLY, request.slot, request.number, &message, index),
    };
    (0..message.len().div_ceil(CHUNK)).map(|index| of_session(DATA, &part(index).bytes())).collect()
}

/// Starts an impostor that welcomes every client and responds to each request with `answer`.
fn node_that(carrier: &str, mut answer: impl FnMut(&Request<'_>) -> Answers + Send + 'static) -> Impostor {
    impostor(carrier, move |bytes| match bytes[3] {
        HELLO => vec![welcome(bytes)],
        PING => vec![of_session(PONG, &[])],
        _ => requests(bytes).iter().flat_map(&mut answer).collect(),
    })
}

const INFO: &[u8] = br#"{"node_info":{"version":"0","pid":1,"incarnation":1,"memory_bytes":1048576,
    "unassigned_bytes":0,"page_size":4096,"sessions":1,"reclaimed_buffers":0,"scanned_buffers":0}}"#;

fn answered(body: &[u8]) -> Vec<u8> {
    [&[0], body].concat()
}

/// Returns a node's description of a store of 64 slots, modified by `change`.
fn store(change: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
    let mut store = serde_json::json!({ "store": {
        "name": "default", "kind": "prism-kv", "quota": 8 << 20, "incarnation": 1, "region": 1, "secret": 7,
        "table_at": 1 << 20, "table_len": 1072, "wide": false,
        "parameters": r#"{"slots":64,"seed":3,"placement":"hashed","epoch":0}"#,
    } });
    change(&mut store["store"]);
    serde_json::to_vec(&store).expect("plain data")
}

fn is_info(request: &Request<'_>) -> bool {
    request.body.windows(9).any(|word| word == b"node_info")
}

/// Starts an impostor that welcomes every client. At a client's first request, `spoil` corrupts the rings' memory.
fn engine_that_spoils(spoil: fn(&Ring)) -> Impostor {
    engine_by_hand(move |ring| {
        while let Some(frame) = ring.receive(Duration::from_secs(3)) {
            if frame[3] == HELLO {
                ring.send(&welcome(&frame));
                continue;
            }
            spoil(&ring);
            ring.hangs_up_within(Duration::from_secs(3));
            break;
        }
    })
}

#[test]
fn arbitrary_writes_to_a_rings_memory_are_an_error_in_time() {
    let spoils: Vec<fn(&Ring)> = vec![
        |ring| ring.publish(ring.written.get() + raw_ring::RING + 16),
        |ring| ring.publish(ring.written.get() - 16),
        |ring| ring.publish(ring.written.get() + 8),
        |ring| ring.publish(u64::MAX - 15),
        // Frames shorter than their length, and frames longer than the maximum.
        |ring| lie(ring, 13, 16),
        |ring| lie(ring, raw_ring::FRAME_MAX + 1, raw_ring::RING),
        |ring| lie(ring, u32::MAX, 16),
        // A flood of empty frames.
        |ring| (0..20_000).take_while(|_| ring.send(b"")).for_each(drop),
        // Heads beyond the tail or behind the last head, and bells without end.
        |ring| scribble(ring, &[Word::Head(Side::Client)]),
        |ring| scribble(ring, &[Word::Wish(Side::Client), Word::Wish(Side::Engine)]),
        |ring| {
            scribble(ring, &[Word::Tail(Side::Engine), Word::Tail(Side::Client), Word::Head(Side::Engine)])
        },
    ];
    for spoil in spoils {
        let url = engine_that_spoils(spoil);
        println!("{}", fails_to_connect(&url));
    }
}

/// Publishes `published` bytes of the ring, which start with a frame that claims to have `len` bytes.
fn lie(ring: &Ring, len: u32, published: u64) {
    ring.memory.of_ring(Side::Engine, ring.written.get()).store(len.into(), Ordering::SeqCst);
    ring.publish(ring.written.get() + published);
}

/// Writes arbitrary values into these words until the client hangs up, for at most 5 s.
fn scribble(ring: &Ring, words: &[Word]) {
    let until = Instant::now() + Duration::from_secs(5);
    while !ring.is_hung_up() && Instant::now() < until {
        for &word in words {
            for value in [u64::MAX, 0, 3, 16, raw_ring::RING, 1 << 63] {
                ring.memory.word(word).store(value, Ordering::SeqCst);
            }
        }
        ring.bell();
    }
}

fn an_invalid_welcome_is_an_error(carrier: &'static str) {
    let good = welcome_body();
    let mut bad: Vec<Vec<u8>> = (0..good.len()).map(|len| good[..len].to_vec()).collect();
    bad.push([&good[..], &[0; 8]].concat());
    bad.push(vec![0xff; good.len()]);
    bad.push(vec![0; good.len()]);
    bad.push(vec![7; longest(carrier)]);
    // Invalid values of the fields: datagram, credit, assembly, window and share.
    for (at, len, value) in [
        (28, 4, 0_u32),
        (28, 4, 1199),
        (28, 4, u32::MAX),
        (32, 4, 0),
        (32, 4, 100),
        (36, 4, 0),
        (44, 1, 0),
        (44, 1, 65),
        (44, 1, 255),
        (45, 1, 0),
        (45, 1, 65),
    ] {
        let mut body = good.clone();
        body[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        bad.push(body);
    }
    // All of them to one client: it takes none and continues to wait for a valid one.
    let all = bad.clone();
    let url = impostor(carrier, move |bytes| {
        all.iter().map(|body| datagram(WELCOME, 0, u64_at(bytes, 8), body)).collect()
    });
    assert!(fails_to_connect(&url).to_string().contains("no node answered"));
    // Valid ones with another nonce; nothing; garbage; datagrams of the other direction; half a datagram.
    let forged: Vec<fn(&[u8]) -> Answers> = vec![
        |hello| vec![datagram(WELCOME, 0, u64_at(hello, 8) ^ 1, &welcome_body())],
        |_| Vec::new(),
        |_| {
            vec![
                Vec::new(),
                vec![0],
                vec![0xff; 23],
                vec![0xff; 1200],
                b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            ]
        },
        |hello| vec![hello.to_vec()],
        |hello| vec![welcome(hello)[..40].to_vec()],
        |hello| (0..=255).map(|kind| datagram(kind, 0, u64_at(hello, 8) ^ 1, &[0; 48])).collect(),
    ];
    for answer in forged {
        let url = impostor(carrier, answer);
        assert!(fails_to_connect(&url).to_string().contains("no node answered"));
    }
}

fn a_refusal_with_any_bytes_is_reported(carrier: &'static str) {
    let long = "x".repeat(longest(carrier));
    let reasons: [&[u8]; 5] = [b"come back later", b"", b"\xff\xfe\x80", long.as_bytes(), b"\x1b[2J\0\n"];
    for reason in reasons {
        let reason = reason.to_vec();
        let url = impostor(carrier, move |bytes| vec![datagram(REFUSED, 0, u64_at(bytes, 8), &reason)]);
        let error = fails_to_connect(&url).to_string();
        assert!(error.contains("the node refuses"), "{error:.200}");
    }
    // A refusal of another protocol version.
    let url = impostor(carrier, |bytes| {
        let mut refused = datagram(REFUSED, 0, u64_at(bytes, 8), b"?");
        refused[2] = 9;
        vec![refused]
    });
    let error = fails_to_connect(&url).to_string();
    assert!(error.contains("version 9") && error.contains("speaks 2"), "{error}");
}

fn invalid_responses_are_errors_in_time(carrier: &'static str) {
    let answers: Vec<fn(&Request<'_>) -> Answers> = vec![
        |_| Vec::new(),
        |request| reply(request, 1, b""),
        |request| reply(request, 1, &answered(b"")),
        |request| reply(request, 1, &answered(b"null")),
        |request| reply(request, 1, &answered(b"\xff\xff")),
        |request| reply(request, 1, &answered(&b"[".repeat(60_000))),
        |request| reply(request, 1, &answered(br#"{"done":1}"#)),
        |request| reply(request, 1, b"\xff\xfe\xfd is no text"),
        |request| reply(request, 0, &answered(INFO)),
        // Replies for other slots, and for other numbers.
        |request| {
            let other =
                |slot: u8, number: u32| reply(&Request { slot, number, ..*request }, 1, &answered(INFO));
            [other(request.slot + 1, request.number), other(63, 1), other(request.slot, request.number + 1)]
                .concat()
        },
        |request| reply(&Request { number: request.number - 1, ..*request }, 1, &answered(INFO)),
        |request| reply(&Request { slot: 200, ..*request }, 1, &answered(INFO)),
        // Contradictory sizes, and fragments that never complete a message.
        |request| {
            let long = vec![7; 9000];
            let part = |index: usize| Entry::part(REPLY, request.slot, request.number, &long, index);
            let shorter = Entry::part(REPLY, request.slot, request.number, &long[..5000], 1);
            let lie = Entry { size: u32::MAX, ..part(0) };
            let all = [part(0), shorter, part(0), lie, part(1), shorter];
            all.iter().map(|entry| of_session(DATA, &entry.bytes())).collect()
        },
        |request| {
            let long = vec![7; 60_000];
            let part = |index: usize| Entry::part(REPLY, request.slot, request.number, &long, index).bytes();
            (0..50).cycle().take(500).map(|index| of_session(DATA, &part(index))).collect()
        },
        // HAVE entries that claim all fragments and request them again.
        |request| {
            let have = Entry::whole(HAVE, request.slot, request.number, &[0xff; 16]);
            vec![of_session(DATA, &have.bytes()); 50]
        },
        |_| vec![of_session(PONG, &[]); 1000],
        |_| (0..200).map(|nth| datagram(DATA, SESSION, nth, &[])).collect(),
    ];
    for_each_at_once(answers, |_, answer| {
        let url = node_that(carrier, answer);
        fails_to_connect(&url);
    });
    // The control: a client accepts a valid response.
    let url = node_that(carrier, |request| reply(request, 1, &answered(INFO)));
    in_time(|| farside::connect(&url)).expect("an impostor that behaves like a node");
}

fn a_session_that_ends_during_a_call_is_an_error(carrier: &'static str) {
    let bodies: Vec<Vec<u8>> = vec![
        Vec::new(),
        vec![0; 8],
        vec![0xff; 8],
        [&64_u64.to_le_bytes()[..], &[0; 64 * 8]].concat(),
        [&64_u64.to_le_bytes()[..], &[0xff; 64 * 8]].concat(),
        [&u64::MAX.to_le_bytes()[..], &[1; 64 * 8]].concat(),
        [&63_u64.to_le_bytes()[..], &[1; 63 * 8]].concat(),
        vec![1; 1000],
    ];
    for_each_at_once(bodies, |_, body| {
        let url = node_that(carrier, move |_| vec![of_session(GONE, &body); 100]);
        fails_to_connect(&url);
    });
}

fn invalid_store_descriptions_are_errors(carrier: &'static str) {
    type Change = fn(&mut serde_json::Value);
    let changes: Vec<Change> = vec![
        |store| store["parameters"] = "".into(),
        |store| store["parameters"] = "[".repeat(20_000).into(),
        |store| store["parameters"] = r#"{"slots":0,"seed":3,"placement":"hashed","epoch":0}"#.into(),
        |store| store["parameters"] = r#"{"slots":3,"seed":3,"placement":"hashed","epoch":0}"#.into(),
        |store| store["parameters"] = r#"{"slots":65,"seed":3,"placement":"hashed","epoch":0}"#.into(),
        |store| {
            store["parameters"] =
                r#"{"slots":9223372036854775808,"seed":3,"placement":"hashed","epoch":0}"#.into()
        },
        |store| {
            store["parameters"] =
                r#"{"slots":1152921504606846976,"seed":3,"placement":"hashed","epoch":0}"#.into()
        },
        |store| store["table_len"] = 0.into(),
        |store| store["table_at"] = u64::MAX.into(),
        |store| store["table_at"] = (u64::MAX - 1023).into(),
        |store| store["kind"] = "frob".into(),
        |store| store["region"] = u64::MAX.into(),
        |store| store["secret"] = serde_json::Value::Null,
    ];
    for_each_at_once(changes, |nth, change| {
        let described = store(change);
        let url = node_that(carrier, move |request| match (request.kind, is_info(request)) {
            (CALL, true) => reply(request, 1, &answered(INFO)),
            (CALL, false) => reply(request, 1, &answered(&described)),
            _ => reply(request, 1, &[5, 0, 0, 0, 0, 0, 0, 0]),
        });
        let pool = in_time(|| farside::connect(&url)).expect("an impostor that behaves like a node");
        let failed = in_time(|| {
            farside::local::Client::open(&pool, "default")
                .map_err(|error| error.to_string())
                .and_then(|mut client| client.get(b"k").map(|_| ()).map_err(|error| error.to_string()))
        });
        assert!(failed.is_err(), "change {nth}");
    });
}

fn invalid_replies_are_errors_in_time(carrier: &'static str) {
    // The body of the reply to a chain.
    type Body = fn(&[u8]) -> Vec<u8>;
    let bodies: Vec<Body> = vec![
        |_| Vec::new(),
        |_| vec![0; 7],
        |_| vec![0xff; 40],
        |chain| vec![0; 8 * usize::from(u16_at(chain, 16))],
        // Ends beyond the outputs, or descending; unknown statuses.
        |chain| [0, 0, 0, 0, 0xff, 0xff, 0xff, 0x7f].repeat(u16_at(chain, 16).into()),
        |chain| [9, 0, 0, 0, 0, 0, 0, 0].repeat(u16_at(chain, 16).into()),
        |chain| [3, 0, 0, 0, 0, 0, 0, 0].repeat(u16_at(chain, 16).into()),
        |chain| {
            let ops: usize = u16_at(chain, 16).into();
            let ends = (0..ops).flat_map(|op| [0, 0, 0, 0, 16 * (op as u8 + 1), 0, 0, 0]);
            ends.chain(vec![0xff; 16 * ops]).collect()
        },
        // Invalid items: garbage, very long, or of another key.
        |chain| {
            let ops: usize = u16_at(chain, 16).into();
            let len = 60_000_u32;
            let ends = (0..ops).flat_map(|_| [&[0; 4][..], &len.to_le_bytes()].concat());
            ends.chain(vec![0x5a; len as usize]).collect()
        },
        |chain| {
            let ops: usize = u16_at(chain, 16).into();
            let item = [[0; 8], [0xff; 8]].concat().repeat(64);
            let ends = (0..ops).flat_map(|_| [&[0; 4][..], &(item.len() as u32).to_le_bytes()].concat());
            ends.chain(item.clone()).collect()
        },
        |_| vec![0; 65_500],
    ];
    for_each_at_once(bodies, |nth, body| {
        let described = store(|_| {});
        let url = node_that(carrier, move |request| match (request.kind, is_info(request)) {
            (CALL, true) => reply(request, 1, &answered(INFO)),
            (CALL, false) => reply(request, 1, &answered(&described)),
            _ => reply(request, 1, &body(request.body)),
        });
        let pool = in_time(|| farside::connect(&url)).expect("an impostor that behaves like a node");
        let mut client = in_time(|| farside::local::Client::open(&pool, "default"))
            .expect("a description that looks valid");
        // The bytes may mean that the key is absent. Any other result must be an error, and no call may loop.
        let got: Result<bool, KvError> = in_time(|| client.get(b"k").map(|item| item.is_some()));
        assert!(!matches!(got, Ok(true)), "{nth}: the client returned a value that nobody put");
        let put = in_time(|| client.put(b"k", &[1; 500]));
        let _either = in_time(|| client.delete(b"k"));
        let large = in_time(|| client.put(b"k", &vec![1; 200_000]));
        println!("{carrier} {nth}: get {got:?}, put {put:?}, large {large:?}");
    });
}
