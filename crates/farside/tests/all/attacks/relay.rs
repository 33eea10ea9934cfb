//! A man in the middle between a client and its node, who sees every packet and may change, drop or replay it. If
//! packets are sealed, the client's only damage is lost packets.

use crate::attacks::target::{SECRET, contains_secret};
use crate::support::{Process, command, farside, run, until};
use farside_fabrics::udp::seal::{self, node::STRANGER_WAIT};
use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tempfile::TempDir;

/// A node that seals its packets, and a token for the node.
struct Sealed {
    node: Process,
    at: SocketAddr,
    token: String,
    folder: TempDir,
}

impl Sealed {
    fn start() -> Sealed {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
        let (secret, tokens) = (path("secret"), path("tokens.toml"));
        let made =
            farside(["token", "new", "--name", "a", "--admin", "--store", "*=all", "--secret-file", &secret]);
        std::fs::write(&tokens, made.done().text()).expect("a file");
        std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).expect("our own file");
        let mut command = command();
        command.args(["serve", "--die-with-parent", "--memory", "32MiB", "--store", "default"]);
        command.args(["--listen", "udp://127.0.0.1:0", "--tokens", &tokens]);
        let node = Process::start(command, folder.path().join("log"));
        node.line();
        let at = node.line().rsplit("//").next().and_then(|at| at.parse().ok()).expect("an address");
        let token = std::fs::read_to_string(&secret).expect("the command wrote the file").trim().to_owned();
        Sealed { node, at, token, folder }
    }

    fn connect(&self, at: SocketAddr) -> Result<farside::Pool, farside::Error> {
        let options = farside::Options { token: Some(self.token.clone()), ..Default::default() };
        farside::connect_with(&format!("udp://{at}"), &options)
    }

    fn secret(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    /// Returns the node's info, as `farside info --json` prints it.
    fn info(&self) -> serde_json::Value {
        let mut command = command();
        command.args(["info", "--json", "--pool", &format!("udp://{}", self.at), "--token-file"]);
        command.arg(self.secret());
        run(command, b"").done().json()
    }

    fn refused(&self, what: &str) -> u64 {
        self.info()["refusals"][what].as_u64().expect("a number")
    }
}

/// Direction of a datagram from a client to the node; an index into `Seen::ways`.
const TO_NODE: usize = 0;
/// Direction of a datagram from the node to a client; an index into `Seen::ways`.
const TO_CLIENT: usize = 1;
/// Offset of the kind in a sealed datagram, in bytes.
const KIND_AT: usize = 3;
/// Kind of a datagram that is a greeting.
const GREETING: u8 = 1;

/// Manipulations of datagrams; indexes into [`Relay::done`].
const FLIPPED: usize = 0;
const CUT: usize = 1;
const REPLAYED: usize = 2;
const TURNED_BACK: usize = 3;
const DOUBLED: usize = 4;
const HELD: usize = 5;

/// The man in the middle, who forwards or manipulates each datagram.
struct Relay {
    node: SocketAddr,
    at: SocketAddr,
    front: UdpSocket,
    seen: Mutex<Seen>,
    done: [AtomicU64; 6],
}

#[derive(Default)]
struct Seen {
    draws: u64,
    ways: [Vec<Vec<u8>>; 2],
}

impl Relay {
    /// Starts a relay that works until the test's process exits.
    fn start(node: SocketAddr) -> Arc<Relay> {
        let front = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let at = front.local_addr().expect("a bound socket");
        let done = [const { AtomicU64::new(0) }; 6];
        let relay = Arc::new(Relay { node, at, front, seen: Mutex::default(), done });
        let working = Arc::clone(&relay);
        std::thread::spawn(move || working.to_node());
        relay
    }

    fn to_node(self: Arc<Relay>) {
        let mut backs: HashMap<SocketAddr, (Arc<UdpSocket>, Option<Vec<u8>>)> = HashMap::new();
        let mut buffer = vec![0; 70_000];
        while let Ok((len, client)) = self.front.recv_from(&mut buffer) {
            let (back, held) = backs.entry(client).or_insert_with(|| {
                let back = UdpSocket::bind("127.0.0.1:0").expect("a port");
                back.connect(self.node).expect("an address");
                let back = Arc::new(back);
                let (relay, from) = (Arc::clone(&self), Arc::clone(&back));
                std::thread::spawn(move || relay.to_client(client, &from));
                (back, None)
            });
            self.pass(TO_NODE, &buffer[..len], held, |bytes| drop(back.send(bytes)));
        }
    }

    fn to_client(&self, client: SocketAddr, back: &UdpSocket) {
        let (mut buffer, mut held) = (vec![0; 70_000], None);
        while let Ok(len) = back.recv(&mut buffer) {
            let send = |bytes: &[u8]| drop(self.front.send_to(bytes, client));
            self.pass(TO_CLIENT, &buffer[..len], &mut held, send);
        }
    }

    /// Forwards a datagram in direction `way`, or manipulates it. `held` is the datagram that is held back.
    fn pass(&self, way: usize, bytes: &[u8], held: &mut Option<Vec<u8>>, send: impl Fn(&[u8])) {
        let mut seen = self.seen.lock().expect("no holder of the lock panics");
        seen.ways[way].push(bytes.to_vec());
        seen.draws += 1;
        // The finalizer of MurmurHash, so that every run draws the same.
        let mut draw = seen.draws.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        draw = (draw ^ draw >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        draw ^= draw >> 33;
        let place = |len: usize| (draw >> 16) as usize % len;
        let of = |ways: &[Vec<Vec<u8>>; 2], way: usize| {
            let ways = &ways[way];
            (!ways.is_empty()).then(|| ways[place(ways.len())].clone())
        };
        let note = |what: usize| {
            self.done[what].fetch_add(1, Ordering::Relaxed);
        };
        // A changed greeting is refused, as another test shows; here it would only end the session.
        let is_greeting = bytes[KIND_AT] == GREETING;
        match draw % 100 {
            0..4 if !is_greeting => {
                note(FLIPPED);
                let mut bytes = bytes.to_vec();
                let place = place(bytes.len());
                bytes[place] ^= 1 << (draw >> 8 & 7);
                send(&bytes);
            }
            4..7 if !is_greeting => {
                note(CUT);
                send(&bytes[..place(bytes.len())]);
            }
            7..14 => {
                note(REPLAYED);
                send(bytes);
                of(&seen.ways, way).iter().for_each(|bytes| send(bytes));
            }
            14..18 => {
                note(TURNED_BACK);
                of(&seen.ways, 1 - way).iter().for_each(|bytes| send(bytes));
                send(bytes);
            }
            18..22 => {
                note(DOUBLED);
                send(bytes);
                send(bytes);
            }
            22..28 => {
                note(HELD);
                held.replace(bytes.to_vec()).iter().for_each(|bytes| send(bytes));
                return;
            }
            _ => send(bytes),
        }
        held.take().iter().for_each(|bytes| send(bytes));
    }
}

#[test]
fn a_man_in_the_middle_of_sealed_packets_can_only_lose_them() {
    let sealed = Sealed::start();
    let relay = Relay::start(sealed.at);
    let began = Instant::now();
    let pool = sealed.connect(relay.at).expect("the relay forwards greetings");
    let client = pool.open("default").expect("a store");
    let key = |n: u64| [&SECRET[..], &n.to_le_bytes()].concat();
    // A counter that only compare-and-put raises, so that each step must run exactly once and in order.
    const STEPS: u64 = 1500;
    client.put(key(0), 0_u64.to_le_bytes()).wait().expect("stored");
    let mut version = client.get(key(0)).wait().expect("read").expect("a value").version;
    for step in 1..=STEPS {
        let raised = client.compare_and_put(key(0), version, step.to_le_bytes()).wait().expect("an outcome");
        version = raised.unwrap_or_else(|found| panic!("step {step} found {found:?}"));
        if step % 10 == 0 {
            client.put(key(step), SECRET.repeat(30)).wait().expect("stored");
        }
    }
    assert_eq!(client.get(key(0)).wait().expect("read").expect("a value").value, STEPS.to_le_bytes());
    for step in (10..=STEPS).step_by(10) {
        assert_eq!(client.get(key(step)).wait().expect("read").expect("a value").value, SECRET.repeat(30));
    }
    drop((client, pool));
    let done: Vec<u64> = relay.done.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    let seen = std::mem::take(&mut *relay.seen.lock().expect("no holder of the lock panicked")).ways;
    println!(
        "{} and {} datagrams passed; flipped, cut, replayed, turned back, doubled, held: {done:?}",
        seen[TO_NODE].len(),
        seen[TO_CLIENT].len()
    );
    assert!(done.iter().all(|&count| count > 20), "each manipulation must strike: {done:?}");

    // No packet reveals a value or the token.
    let token = sealed.token.as_bytes();
    let tells_the_token =
        |bytes: &[u8]| bytes.windows(8).any(|some| token.windows(8).any(|secret| some == secret));
    for bytes in seen.iter().flatten() {
        assert!(!contains_secret(bytes) && !tells_the_token(bytes), "{}", bytes.escape_ascii());
    }
    // The node has counted the manipulations.
    until("forgeries and replays are counted", || {
        sealed.refused("forged") > done[FLIPPED] / 4 && sealed.refused("replayed") > done[DOUBLED] / 4
    });
    assert_eq!(sealed.refused("bad_tokens"), 0, "no token was guessed");

    // All packets once more, from another address: the node opens no session, and sends no response unless a connection
    // was forgotten. Then it answers the connection's greeting, and seals the answer.
    until("the session has ended", || sealed.info()["sessions"] == 1);
    let before = sealed.refused("forged") + sealed.refused("replayed");
    let again = UdpSocket::bind("127.0.0.1:0").expect("a port");
    again.set_nonblocking(true).expect("our socket");
    let mut answers = 0;
    for bytes in seen.iter().flatten() {
        again.send_to(bytes, sealed.at).expect("sent");
        answers += u64::from(again.recv(&mut [0; 2000]).is_ok());
    }
    until("the replays are counted", || {
        answers += u64::from(again.recv(&mut [0; 2000]).is_ok());
        sealed.refused("forged") + sealed.refused("replayed") > before
    });
    let greetings = seen[TO_NODE].iter().filter(|bytes| bytes.len() == seal::GREETING).count() as u64;
    let answers_max = if began.elapsed() < STRANGER_WAIT { 0 } else { greetings };
    assert!(answers <= answers_max, "{answers} answers to replays, of {greetings} greetings");
    assert_eq!(sealed.info()["sessions"], 1, "only the session that queries the node");
    assert!(!sealed.node.log().contains("farside_"), "{}", sealed.node.log());
}

#[test]
fn a_changed_greeting_is_refused_and_reveals_nothing() {
    let sealed = Sealed::start();
    let front = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let at = front.local_addr().expect("a bound socket");
    let (node, sent) = (sealed.at, Arc::new(Mutex::new(Vec::new())));
    let record = Arc::clone(&sent);
    std::thread::spawn(move || {
        let back = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let mut buffer = vec![0; 70_000];
        let mut place = 0;
        while let Ok((len, client)) = front.recv_from(&mut buffer) {
            record.lock().expect("no holder of the lock panics").push(buffer[..len].to_vec());
            // Places in the clear part, in the sealed part, and in the seal itself.
            buffer[[30, 90, len - 1, 20, 27][place % 5]] ^= 1;
            place += 1;
            back.send_to(&buffer[..len], node).expect("sent");
            back.set_read_timeout(Some(std::time::Duration::from_millis(200))).expect("a time");
            if let Ok((len, _)) = back.recv_from(&mut buffer) {
                assert!(len < 1200, "a response is shorter than the greeting");
                let _lost = front.send_to(&buffer[..len], client);
            }
        }
    });
    for _ in 0..5 {
        let error = sealed.connect(at).expect_err("the greeting was changed").to_string();
        assert!(error.contains("does not know this token") || error.contains("no node answered"), "{error}");
    }
    let sent = sent.lock().expect("no holder of the lock panicked");
    let token = sealed.token.as_bytes();
    for bytes in sent.iter() {
        assert_eq!((&bytes[..4], bytes.len()), (&[b'F', b'x', 1, GREETING][..], 1200));
        assert!(!bytes.windows(8).any(|some| token.windows(8).any(|secret| some == secret)));
    }
}
