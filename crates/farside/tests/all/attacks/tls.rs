//! Attacks on TLS: invalid and endless handshakes, and a man in the middle who reads, changes and replays.

use crate::attacks::peer::{PATIENCE, Raw};
use crate::attacks::target::Target;
use crate::support::until;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn address(url: &str) -> SocketAddr {
    url.split_once("://").expect("a url").1.parse().expect("an address")
}

/// Opens a TCP connection to the node's TLS port, for bytes made by hand.
fn stream(target: &Target) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address(target.url("tls")), PATIENCE).expect("the node listens");
    stream.set_write_timeout(Some(PATIENCE)).expect("a stream");
    stream
}

#[track_caller]
fn is_hung_up(stream: TcpStream) {
    assert!(Raw::Tcp(stream, Vec::new()).is_hung_up(PATIENCE), "the node does not hang up");
}

/// Returns the first TLS record that a Farside client sends.
fn greeting(target: &Target) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tls://{}", listener.local_addr().expect("an address"));
    let options = target.options.clone();
    let client = std::thread::spawn(move || farside::connect_with(&url, &options).map(drop));
    let (mut stream, _) = listener.accept().expect("the client connects");
    let mut head = [0; 5];
    stream.read_exact(&mut head).expect("a record");
    let mut body = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
    stream.read_exact(&mut body).expect("a record");
    drop(stream);
    assert!(client.join().expect("the client returns").is_err(), "no node answered");
    [&head[..], &body].concat()
}

/// A man in the middle who records all bytes and may change one in each direction.
struct Proxy {
    url: String,
    /// Bytes from clients to the node.
    up: Arc<Mutex<Vec<u8>>>,
    /// Bytes from the node to clients.
    down: Arc<Mutex<Vec<u8>>>,
}

impl Proxy {
    /// Starts a proxy between clients and the node at `url`. Changes the byte at offset `change_up` towards the node,
    /// and the byte at offset `change_down` towards the client.
    fn new(url: &str, change_up: Option<usize>, change_down: Option<usize>) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (scheme, _) = url.split_once("://").expect("a url");
        let to = address(url);
        let proxy = Proxy {
            url: format!("{scheme}://{}", listener.local_addr().expect("an address")),
            up: Arc::default(),
            down: Arc::default(),
        };
        let (up, down) = (Arc::clone(&proxy.up), Arc::clone(&proxy.down));
        // The thread lives as long as the test's process.
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let node = TcpStream::connect(to).expect("the node listens");
                let [from, into] = [&client, &node].map(|stream| stream.try_clone().expect("a descriptor"));
                let (up, down) = (Arc::clone(&up), Arc::clone(&down));
                std::thread::spawn(move || pass(from, into, change_up, &up));
                std::thread::spawn(move || pass(node, client, change_down, &down));
            }
        });
        proxy
    }

    fn kept(seen: &Mutex<Vec<u8>>) -> Vec<u8> {
        seen.lock().expect("no holder of the lock panicked").clone()
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, change: Option<usize>, seen: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    loop {
        let len = match from.read(&mut buffer) {
            Ok(0) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
            Ok(len) => len,
        };
        let bytes = &mut buffer[..len];
        if let Some(byte) = change.and_then(|at| at.checked_sub(passed)).and_then(|at| bytes.get_mut(at)) {
            *byte ^= 0x40;
        }
        passed += len;
        seen.lock().expect("no holder of the lock panicked").extend_from_slice(bytes);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _gone = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

fn holds(bytes: &[u8], what: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}

#[test]
fn invalid_handshakes_are_disconnected_at_once() {
    let target = Target::start();
    let witness = target.witness("tls");
    let before = target.now();
    let greeting = greeting(&target);
    let frame = [&1200_u32.to_le_bytes()[..], &[7; 1200]].concat();
    let mut wrong: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"*1\r\n$4\r\nPING\r\n".to_vec(),
        frame,
        vec![0; 64],
        vec![0xff; 4096],
        vec![22, 3, 1, 0xff, 0xff, 1],     // A record of an impossible length.
        vec![22, 3, 1, 0, 4, 99, 0, 0, 0], // A message of an unknown type.
        vec![23, 3, 3, 0, 32, 1],          // Data before the key exchange.
        vec![21, 3, 3, 0, 2, 2, 40],       // An alert.
    ];
    wrong[7].resize(5 + 32, 9);
    // A greeting with one byte changed: in the header, in the version, in a length.
    for at in [0, 5, 9, 43] {
        let mut changed = greeting.clone();
        changed[at] ^= 0x55;
        wrong.push(changed);
    }
    for bytes in wrong {
        let mut one = stream(&target);
        one.write_all(&bytes).expect("the node listens");
        let mut one = Raw::Tcp(one, Vec::new());
        assert!(one.is_hung_up(PATIENCE), "the node does not hang up: {}", bytes[..9].escape_ascii());
        witness.assert_well();
    }
    drop(witness);
    target.assert_as_before(before);
}

/// The node disconnects a client that does not complete its handshake in time, even if no other client wakes the
/// engine.
#[test]
fn unfinished_handshakes_are_closed_even_if_alone() {
    let target = Target::start();
    let before = target.now();
    let greeting = greeting(&target);
    let alone: Vec<TcpStream> = [0, 1, 5, greeting.len() / 2, greeting.len() - 1, greeting.len()]
        .map(|len| {
            let mut one = stream(&target);
            one.write_all(&greeting[..len]).expect("the node listens");
            one
        })
        .into();
    alone.into_iter().for_each(is_hung_up);
    // One byte every 400 ms.
    let mut slow = stream(&target);
    let since = std::time::Instant::now();
    let mut bytes = greeting.iter();
    while slow.write_all(&[*bytes.next().expect("a greeting is long")]).is_ok() {
        assert!(since.elapsed() < PATIENCE, "the node does not hang up");
        std::thread::sleep(Duration::from_millis(400));
    }
    target.witness("tls").assert_well();
    target.assert_as_before(before);
}

#[test]
fn a_crowd_of_handshakes_does_not_block_other_clients() {
    let target = Target::start();
    let witness = target.witness("tls");
    let before = target.now();
    let greeting = greeting(&target);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (stopped, to) = (Arc::clone(&stop), address(target.url("tls")));
    let crowd = std::thread::spawn(move || {
        let (mut begun, mut open) = (0, std::collections::VecDeque::new());
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            // The listener's backlog may be full.
            let Ok(mut one) = TcpStream::connect_timeout(&to, Duration::from_millis(200)) else { continue };
            begun += u32::from(one.write_all(&greeting).is_ok());
            open.push_back(one);
            if open.len() > 200 {
                open.pop_front();
            }
        }
        begun
    });
    let served = witness.gets_in(Duration::from_secs(2));
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let begun = crowd.join().expect("the thread returns");
    println!("{served} gets were served while {begun} handshakes began");
    assert!(served > 100 && begun > 200, "{served} gets beside {begun} handshakes");
    until("new clients can connect again", || {
        farside::connect_with(target.url("tls"), &target.options).is_ok()
    });
    witness.assert_well();
    drop(witness);
    target.assert_as_before(before);
}

const TOKEN: &str = "farside_which_nobody_on_the_way_is_to_read";
const VALUE: &[u8] = b"a value that nobody on the way is to read";

#[test]
fn a_man_in_the_middle_cannot_read_tokens_keys_or_values() {
    let target = Target::start();
    for scheme in ["tls", "tcp"] {
        let proxy = Proxy::new(target.url(scheme), None, None);
        let options = farside::Options { token: Some(TOKEN.into()), ..target.options.clone() };
        let pool = farside::connect_with(&proxy.url, &options).expect("the node serves");
        let client = pool.open("default").expect("a store");
        client.put("a key that is a secret", VALUE).wait().expect("stored");
        let got = client.get("a key that is a secret").wait().expect("read").expect("it was stored");
        assert_eq!(got.value, VALUE);
        let (up, down) = (Proxy::kept(&proxy.up), Proxy::kept(&proxy.down));
        let is_plain = scheme == "tcp"; // The control: over tcp, the search must find all of them.
        assert_eq!(holds(&up, TOKEN.as_bytes()), is_plain, "{scheme}");
        assert_eq!(holds(&up, b"a key that is a secret"), is_plain, "{scheme}");
        assert_eq!(holds(&up, VALUE), is_plain, "{scheme}");
        assert_eq!(holds(&down, VALUE), is_plain, "{scheme}");
    }
}

#[test]
fn a_byte_changed_in_transit_gives_an_error_not_a_wrong_value() {
    let target = Target::start();
    let witness = target.witness("tls");
    let pool = farside::connect_with(target.url("tls"), &target.options).expect("the node serves");
    pool.open("default").expect("a store").put("k", VALUE).wait().expect("stored");
    let before = target.now();
    let mut broken = 0;
    // Offsets in the greeting, in the handshake, and in the data; in both directions.
    for at in [3, 60, 150, 500, 700, 900, 1500, 2500, 3500] {
        for (up, down) in [(Some(at), None), (None, Some(at))] {
            let proxy = Proxy::new(target.url("tls"), up, down);
            let opened =
                farside::connect_with(&proxy.url, &target.options).and_then(|pool| pool.open("default"));
            let Ok(client) = opened else {
                broken += 1;
                continue;
            };
            for _ in 0..40 {
                match client.get("k").wait() {
                    Ok(got) => assert_eq!(got.expect("it was stored").value, VALUE),
                    Err(_) => {
                        broken += 1;
                        break;
                    }
                }
            }
        }
    }
    println!("{broken} of 18 clients got an error");
    assert!(broken > 9, "{broken}");
    witness.assert_well();
    drop((witness, pool));
    target.assert_as_before(before);
}

#[test]
fn a_replayed_connection_is_closed_and_changes_nothing() {
    let target = Target::start();
    let proxy = Proxy::new(target.url("tls"), None, None);
    let open = |url: &str| {
        let pool = farside::connect_with(url, &target.options).expect("the node serves");
        pool.open("default").expect("a store")
    };
    open(&proxy.url).put("k", "before").wait().expect("stored");
    let direct = open(target.url("tls"));
    direct.put("k", "after").wait().expect("stored");
    let before = target.now();
    let heard = Proxy::kept(&proxy.up);
    assert!(heard.len() > 1500, "a handshake and requests: {}", heard.len());
    for _ in 0..5 {
        let mut again = stream(&target);
        again.write_all(&heard).expect("the node listens");
        is_hung_up(again);
    }
    assert_eq!(direct.get("k").wait().expect("read").expect("it was stored").value, b"after");
    target.assert_as_before(before);
}
