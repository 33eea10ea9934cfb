//! Tests of seals and connections without sockets: two ends, and an attacker on the path.

use super::client::Client;
use super::node::{Arrived, CONNECTIONS_MAX, Node, STRANGER_WAIT};
use super::*;
use crate::session::carrier::Outsider;
use crate::session::packet::{self, HEADER as SESSION_HEADER};
use crate::session::{DATAGRAM_MIN, TOKEN_BYTES_MAX};
use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

const SECRET: [u8; 32] = [7; 32];
const NONCE: u64 = 0x1122_3344_5566_7788;

fn shared(byte: u8) -> Shared {
    Shared::new([byte; 32])
}

/// Returns a function that draws different bytes on each call, and the same sequence for the same seed.
fn draws(seed: u8) -> impl FnMut() -> Random + Send + 'static {
    let mut drawn = 0_u64;
    move || {
        drawn += 1;
        let mut random = [seed; 32];
        random[..8].copy_from_slice(&drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        random
    }
}

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

const HERE: u16 = 1;

/// Returns a node that knows the secrets made of the bytes 0 to 7.
fn node() -> Node {
    node_of(1)
}

fn node_of(seed: u8) -> Node {
    let find = |name| (0..8).map(shared).find(|shared| shared.name() == name);
    Node::new(Box::new(find), Box::new(draws(seed)))
}

/// Returns a datagram of a session: carriers only inspect its header's kind and secret.
fn datagram(kind: packet::Kind, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len.max(SESSION_HEADER)];
    bytes[..2].copy_from_slice(&packet::MAGIC.to_le_bytes());
    (bytes[2], bytes[3]) = (packet::VERSION, kind as u8);
    bytes[8..16].copy_from_slice(&NONCE.to_le_bytes());
    for (index, byte) in bytes.iter_mut().enumerate().skip(SESSION_HEADER) {
        *byte = index as u8 | 1;
    }
    bytes
}

/// Returns a HELLO with a token of `token` bytes.
fn hello(token: usize) -> Vec<u8> {
    let fixed = 48;
    let mut bytes = datagram(packet::Kind::Hello, SESSION_HEADER + fixed + token);
    bytes[SESSION_HEADER + 40..SESSION_HEADER + 44].copy_from_slice(&(token as u32).to_le_bytes());
    bytes.resize(DATAGRAM_MIN, 0);
    bytes
}

fn seal(client: &mut Client, datagram: &[u8]) -> Vec<u8> {
    let (len, mut out) = (client.sealed_len(datagram), b"before".to_vec());
    client.seal(datagram, &mut out);
    assert_eq!(out.len(), b"before".len() + len, "sealed_len is exact");
    out.split_off(b"before".len())
}

/// Passes a copy of `bytes` to the node. Returns the connection and the opened datagram; otherwise the reason for the
/// refusal, or `None` if the bytes had no effect.
fn arrive(node: &mut Node, from: SocketAddr, bytes: &[u8]) -> Result<(u32, Vec<u8>), Option<Outsider>> {
    match node.open(from, &mut bytes.to_vec()) {
        Arrived::Datagram(connection, datagram) => Ok((connection, datagram.to_vec())),
        Arrived::Outsider(_, why) => Err(Some(why)),
        Arrived::Nothing => Err(None),
    }
}

fn answer(node: &mut Node, connection: u32, datagram: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let overhead = node.overhead(connection).expect("the connection exists");
    node.seal(connection, datagram, &mut out);
    assert_eq!(out.len(), datagram.len() + overhead, "overhead is exact");
    out
}

fn hear(client: &mut Client, bytes: &[u8]) -> Option<Vec<u8>> {
    client.open(&mut bytes.to_vec()).map(<[u8]>::to_vec)
}

/// Returns two connected ends, and the number of the connection.
fn connected() -> (Client, Node, u32) {
    let (mut client, mut node) = (Client::new(shared(7), draws(2)), node());
    let greeting = seal(&mut client, &hello(72));
    let (connection, _) = arrive(&mut node, at(HERE), &greeting).expect("a known secret");
    let welcome = datagram(packet::Kind::Welcome, 80);
    assert_eq!(hear(&mut client, &answer(&mut node, connection, &welcome)), Some(welcome));
    let ping = datagram(packet::Kind::Ping, 0);
    assert_eq!(arrive(&mut node, at(HERE), &seal(&mut client, &ping)), Ok((connection, ping)));
    (client, node, connection)
}

#[test]
fn each_end_opens_what_the_other_seals() {
    let (mut client, mut node, connection) = connected();
    for len in [24, 25, 600, 8192, 16 * 1024 - OVERHEAD] {
        let said = datagram(packet::Kind::Data, len);
        let sealed = seal(&mut client, &said);
        assert_eq!(sealed.len(), len + OVERHEAD);
        assert_eq!(arrive(&mut node, at(HERE), &sealed), Ok((connection, said.clone())));
        assert_eq!(hear(&mut client, &answer(&mut node, connection, &said)), Some(said));
    }
    assert_eq!((client.dropped(), node.dropped()), Default::default());
}

#[test]
fn a_greeting_carries_the_longest_token_and_hides_it() {
    for token in [0, 1, TOKEN_BYTES_MAX] {
        let (mut client, mut node) = (Client::new(shared(7), draws(2)), node());
        let hello = hello(token);
        let greeting = seal(&mut client, &hello);
        assert_eq!((greeting.len(), greeting_nonce(&greeting)), (GREETING, Some(NONCE)));
        let said = &hello[16..];
        assert!(
            !greeting.windows(8).any(|sealed| said.windows(8).any(|said| said != [0; 8] && said == sealed))
        );
        assert!(!greeting.windows(16).any(|sealed| sealed == &SECRET[..16]));
        let (_, opened) = arrive(&mut node, at(HERE), &greeting).expect("a known secret");
        assert_eq!(opened, hello, "including trailing zeros, which its checksum covers");
    }
}

#[test]
fn a_changed_or_truncated_datagram_is_not_opened() {
    let (mut client, mut node) = (Client::new(shared(7), draws(2)), node());
    let greeting = seal(&mut client, &hello(72));
    for place in 0..greeting.len() {
        let mut changed = greeting.clone();
        changed[place] ^= 1 << (place % 8);
        assert!(arrive(&mut node, at(HERE), &changed).is_err(), "byte {place} of a greeting");
        assert!(arrive(&mut node, at(HERE), &greeting[..place]).is_err(), "{place} bytes of a greeting");
    }
    assert!(arrive(&mut node, at(HERE), &[&greeting[..], &[0]].concat()).is_err(), "a longer greeting");
    assert_eq!(node.connections(), 0, "forged greetings use no memory");
    let (connection, _) = arrive(&mut node, at(HERE), &greeting).expect("an intact greeting");
    let accept = answer(&mut node, connection, &datagram(packet::Kind::Welcome, 80));
    for place in 0..accept.len() {
        let mut changed = accept.clone();
        changed[place] ^= 1 << (place % 8);
        assert_eq!(hear(&mut client, &changed), None, "byte {place} of an ACCEPT");
        assert_eq!(hear(&mut client, &accept[..place]), None, "{place} bytes of an ACCEPT");
    }
    assert!(hear(&mut client, &accept).is_some(), "an intact ACCEPT");
    let data = seal(&mut client, &datagram(packet::Kind::Data, 100));
    let back = answer(&mut node, connection, &datagram(packet::Kind::Data, 100));
    for place in 0..data.len().max(back.len()) {
        for bit in 0..8 {
            let changed = |bytes: &[u8]| {
                let mut changed = bytes.to_vec();
                changed[place.min(bytes.len() - 1)] ^= 1 << bit;
                changed
            };
            assert_eq!(arrive(&mut node, at(HERE), &changed(&data)), Err(None), "byte {place}");
            assert_eq!(hear(&mut client, &changed(&back)), None, "byte {place}");
        }
        assert_eq!(arrive(&mut node, at(HERE), &data[..place.min(data.len() - 1)]), Err(None));
        assert_eq!(hear(&mut client, &back[..place.min(back.len() - 1)]), None, "{place} bytes");
    }
    assert!(arrive(&mut node, at(HERE), &data).is_ok() && hear(&mut client, &back).is_some());
    assert!(node.dropped().forged > 1000 && client.dropped().forged > 1000);
}

#[test]
fn replayed_datagrams_are_dropped_in_any_order() {
    let (mut client, mut node, connection) = connected();
    let mut said: Vec<Vec<u8>> =
        (0..200).map(|number| seal(&mut client, &datagram(packet::Kind::Data, 24 + number))).collect();
    let mut heard: Vec<Vec<u8>> = (0..200)
        .map(|number| answer(&mut node, connection, &datagram(packet::Kind::Data, 24 + number)))
        .collect();
    for index in 0..200 {
        said.swap(index, index * 7 % 200);
        heard.swap(index, index * 11 % 200);
    }
    for (said, heard) in said.iter().zip(&heard) {
        assert!(arrive(&mut node, at(HERE), said).is_ok() && hear(&mut client, heard).is_some());
    }
    for (said, heard) in said.iter().zip(&heard).rev() {
        assert!(arrive(&mut node, at(HERE), said).is_err() && hear(&mut client, heard).is_none());
    }
    assert_eq!((node.dropped().replayed, client.dropped().replayed), (200, 200));
}

#[test]
fn each_direction_connection_and_secret_has_its_own_keys() {
    let (mut client, mut node, connection) = connected();
    let data = seal(&mut client, &datagram(packet::Kind::Data, 100));
    assert_eq!(hear(&mut client, &data), None, "a client does not accept its own datagram");
    let back = answer(&mut node, connection, &datagram(packet::Kind::Data, 100));
    assert_eq!(arrive(&mut node, at(HERE), &back), Err(None));

    // Another client with the same token, and another connection.
    let mut other = Client::new(shared(7), draws(3));
    let (theirs, _) = arrive(&mut node, at(HERE), &seal(&mut other, &hello(72))).expect("a known secret");
    assert_ne!(theirs, connection);
    let welcome = answer(&mut node, theirs, &datagram(packet::Kind::Welcome, 80));
    assert_eq!(hear(&mut client, &welcome), None);
    assert!(hear(&mut other, &welcome).is_some());
    let relabelled = |bytes: &[u8], connection: u32| {
        let mut bytes = bytes.to_vec();
        bytes[4..8].copy_from_slice(&connection.to_le_bytes());
        bytes
    };
    assert_eq!(arrive(&mut node, at(HERE), &relabelled(&data, theirs)), Err(None));
    assert_eq!(hear(&mut other, &relabelled(&back, theirs)), None);

    // A client that knows the name of a token, but not the secret.
    let mut guesser = Client::new(Shared::new([9; 32]), draws(4));
    let greeting = seal(&mut guesser, &hello(72));
    assert_eq!(arrive(&mut node, at(HERE), &greeting), Err(Some(Outsider::WrongSeal)), "unknown name");
    let mut named = greeting;
    named[HEADER + 8..HEADER + 16].copy_from_slice(&shared(7).name().to_le_bytes());
    assert_eq!(arrive(&mut node, at(HERE), &named), Err(Some(Outsider::WrongSeal)), "wrong key");
    assert_eq!(node.connections(), 2);
    let names: BTreeSet<u64> = (0..=255).map(|byte| shared(byte).name()).collect();
    assert_eq!(names.len(), 256);
}

#[test]
fn a_replayed_greeting_yields_other_keys() {
    let mut client = Client::new(shared(7), draws(2));
    let greeting = seal(&mut client, &hello(72));
    let (mut first, mut later) = (node(), node_of(3));
    let welcomes = [&mut first, &mut later].map(|node| {
        let (connection, _) = arrive(node, at(HERE), &greeting).expect("a known secret");
        (connection, answer(node, connection, &datagram(packet::Kind::Welcome, 80)))
    });
    assert_eq!(welcomes[0].0, welcomes[1].0, "both connections have the same number");
    assert!(hear(&mut client, &welcomes[0].1).is_some() && hear(&mut client, &welcomes[1].1).is_none());
    let said = seal(&mut client, &datagram(packet::Kind::Data, 100));
    assert_eq!(arrive(&mut later, at(HERE), &said), Err(None), "it was sent to another node");
    assert!(arrive(&mut first, at(HERE), &said).is_ok());
}

#[test]
fn nonces_never_repeat_under_a_key() {
    let (mut client, mut node, connection) = connected();
    let mut seen = BTreeSet::new();
    for _ in 0..100 {
        for bytes in [
            seal(&mut client, &datagram(packet::Kind::Data, 24)),
            answer(&mut node, connection, &datagram(packet::Kind::Data, 24)),
        ] {
            let header = Header::decode(&bytes).expect("a valid header");
            assert!(header.is(Kind::Data));
            seen.insert((bytes.len(), header.counter.get(), bytes[HEADER..].to_vec()));
        }
    }
    assert_eq!(seen.len(), 200, "two seals of one datagram differ");
    // Greetings, including retransmissions.
    let mut client = Client::new(shared(7), draws(5));
    let counters =
        (0..10).map(|_| Header::decode(&seal(&mut client, &hello(9))).expect("a valid header").counter.get());
    assert!(counters.eq(0..10));
}

#[test]
fn a_key_seals_a_limited_number_of_datagrams() {
    let keys = || shared(1).connection(&[1; 32], &[2; 32])[0].secret.clone();
    let keys = || Keys::new(keys(), b"a direction");
    let edge = 1_u64 << EPOCH_BITS;
    let (mut sealer, mut opener) = (Sealer::new(keys()), Opener::new(keys()));
    let say = |sealer: &mut Sealer, counter: u64| {
        let mut out = Vec::new();
        sealer.counter = counter;
        sealer.seal(&mut out, Kind::Data, 5, &[], |out| out.extend_from_slice(b"a datagram"));
        out
    };
    let sealed: Vec<Vec<u8>> = (edge - 3..edge + 3).map(|counter| say(&mut sealer, counter)).collect();
    let far = say(&mut sealer, 2 * edge);
    let mut open = |bytes: &[u8]| {
        opener.open(&mut bytes.to_vec(), HEADER).map(|opened| assert_eq!(opened, b"a datagram"))
    };
    assert_eq!(open(&sealed[0]), Ok(()));
    // A forgery for the next key does not advance the keys. Datagrams overtaken by those of the next key still open.
    let mut forged = sealed[3].clone();
    forged[HEADER] ^= 1;
    assert_eq!(open(&forged), Err(Unopened::Forged));
    for (index, expected) in [(2, Ok(())), (4, Ok(())), (1, Ok(())), (3, Ok(())), (5, Ok(()))] {
        assert_eq!(open(&sealed[index]), expected, "datagram {index}");
    }
    for again in &sealed {
        assert_eq!(open(again), Err(Unopened::Replayed));
    }
    assert_eq!(open(&far), Ok(()), "a counter under the next key");
    let skipped = say(&mut sealer, 4 * edge);
    assert_eq!(open(&skipped), Err(Unopened::Forged), "a counter two keys ahead is forged");
    // The keys differ.
    let mut at_first = say(&mut Sealer::new(keys()), 7);
    let mut later = say(&mut sealer, 4 * edge + 7);
    at_first[8..16].fill(0);
    later[8..16].fill(0);
    assert_ne!(at_first[HEADER..], later[HEADER..]);
}

#[test]
fn a_repeated_greeting_finds_its_connection_a_replay_does_not() {
    let (mut client, mut node) = (Client::new(shared(7), draws(2)), node());
    let first = seal(&mut client, &hello(72));
    let again = seal(&mut client, &hello(72));
    let (connection, _) = arrive(&mut node, at(HERE), &first).expect("a known secret");
    assert_eq!(arrive(&mut node, at(HERE), &again).expect("a known secret").0, connection);
    for (from, bytes) in [(HERE, &first), (HERE, &again), (2, &first), (2, &again)] {
        assert_eq!(arrive(&mut node, at(from), bytes), Err(None), "from {from}");
    }
    // The response may arrive more than once, and late.
    let accepts: Vec<_> =
        (0..3).map(|_| answer(&mut node, connection, &datagram(packet::Kind::Welcome, 80))).collect();
    assert!(hear(&mut client, &accepts[1]).is_some() && hear(&mut client, &accepts[0]).is_some());
    assert!(hear(&mut client, &accepts[1]).is_none() && hear(&mut client, &accepts[2]).is_some());
    let data = seal(&mut client, &datagram(packet::Kind::Data, 24));
    assert_eq!(arrive(&mut node, at(2), &data), Err(None), "from another address");
    assert!(arrive(&mut node, at(HERE), &data).is_ok());
    assert_eq!(arrive(&mut node, at(HERE), &again), Err(None), "a confirmed client greets no more");
    assert_eq!(node.connections(), 1);
    // Responses are shorter than the greeting.
    assert!(accepts.iter().all(|accept| accept.len() < GREETING));
}

#[test]
fn an_unsealed_datagram_can_only_refuse_a_greeting() {
    let (mut client, mut node) = (Client::new(shared(7), draws(2)), node());
    let refused = datagram(packet::Kind::Refused, 60);
    assert_eq!(hear(&mut client, &refused), Some(refused.clone()), "the session checks the nonce");
    for kind in [packet::Kind::Welcome, packet::Kind::Data, packet::Kind::Pong, packet::Kind::Gone] {
        assert_eq!(hear(&mut client, &datagram(kind, 60)), None);
    }
    let (mut client, _, _) = connected();
    assert_eq!(hear(&mut client, &refused), None, "a connected client ignores refusals");

    // An unsealed HELLO is refused if it is longer than the response. All other unsealed datagrams are ignored.
    let unsealed = |shows_token| Err(Some(Outsider::Unsealed { shows_token }));
    assert_eq!(arrive(&mut node, at(HERE), &hello(72)), unsealed(true));
    assert_eq!(arrive(&mut node, at(HERE), &hello(0)), unsealed(false));
    assert_eq!(arrive(&mut node, at(HERE), &hello(0)[..DATAGRAM_MIN - 1]), Err(None));
    for kind in [packet::Kind::Data, packet::Kind::Ping, packet::Kind::Bye] {
        assert_eq!(arrive(&mut node, at(HERE), &datagram(kind, DATAGRAM_MIN)), Err(None));
    }
    let mut foreign = vec![0; GREETING];
    foreign[..2].copy_from_slice(&MAGIC.to_le_bytes());
    (foreign[2], foreign[3]) = (9, Kind::Greeting as u8);
    foreign[16..24].copy_from_slice(&NONCE.to_le_bytes());
    match node.open(at(HERE), &mut foreign) {
        Arrived::Outsider(NONCE, Outsider::Version { theirs: 9, ours: VERSION }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(node.connections(), 0);
}

#[test]
fn a_restarted_node_answers_a_ping_repeated_in_a_greeting() {
    let (mut client, _, connection) = connected();
    let mut node = node_of(3);
    let ping = datagram(packet::Kind::Ping, 0);
    assert_eq!(arrive(&mut node, at(HERE), &seal(&mut client, &ping)), Err(None), "no connection is known");
    assert!(!client.needs_greeting(&ping), "the first may still get a response");
    assert!(!client.needs_greeting(&datagram(packet::Kind::Data, 60)) && client.needs_greeting(&ping));
    let mut question = Vec::new();
    client.seal_in_greeting(&ping, &mut question);
    let secret = &ping[8..16];
    assert!(!question.windows(8).any(|bytes| bytes == secret), "the session's secret must be sealed");
    let (asked, said) = arrive(&mut node, at(HERE), &question).expect("a known secret");
    assert_eq!(said, ping);
    let gone = datagram(packet::Kind::Gone, 32);
    let answered = answer(&mut node, asked, &gone);
    assert!(answered.len() < question.len());
    assert_eq!(asked, connection, "the new connection has the same number, the worst case");
    assert_eq!(hear(&mut client, &answered), Some(gone));
    // If the node has forgotten nothing, the connection continues.
    assert_eq!(client.sealed_len(&ping), ping.len() + OVERHEAD);
    assert!(!client.needs_greeting(&ping), "the client has received a response");
}

#[test]
fn connections_without_a_session_are_forgotten_others_never() {
    let mut node = node();
    let greet = |node: &mut Node, seed: u8| {
        let mut client = Client::new(shared(7), draws(seed));
        arrive(node, at(HERE), &seal(&mut client, &hello(72))).expect("a known secret").0
    };
    let [used, unused] = [1, 2].map(|seed| greet(&mut node, seed));
    let second = Duration::from_secs(1);
    node.forget_strangers(second, [used, unused].into_iter());
    node.forget_strangers(2 * second, [used].into_iter());
    node.forget_strangers(second + STRANGER_WAIT, [used].into_iter());
    assert_eq!(node.connections(), 2, "the client may come back and ask");
    node.forget_strangers(2 * second + STRANGER_WAIT, [used].into_iter());
    assert!(node.overhead(unused).is_none() && node.overhead(used).is_some());
    // A connection that was without a session and has one again gets a new time limit.
    node.forget_strangers(3 * STRANGER_WAIT, [].into_iter());
    node.forget_strangers(4 * STRANGER_WAIT - second, [used].into_iter());
    node.forget_strangers(9 * STRANGER_WAIT, [used].into_iter());
    assert!(node.overhead(used).is_some());
}

#[test]
fn the_number_of_connections_is_limited() {
    let mut node = node();
    let mut draw = draws(9);
    let mut greet = |node: &mut Node| {
        let random = draw();
        let mut client = Client::new(shared(7), move || random);
        arrive(node, at(HERE), &seal(&mut client, &hello(72))).map(|(connection, _)| connection)
    };
    let all: Vec<u32> = (0..CONNECTIONS_MAX).map(|_| greet(&mut node).expect("below the limit")).collect();
    assert_eq!(greet(&mut node), Err(None), "any of them may have a session");
    let known = all[1..].iter().copied().filter(|connection| *connection != all[5]);
    node.forget_strangers(Duration::from_secs(1), known);
    assert!(greet(&mut node).is_ok() && greet(&mut node).is_ok(), "they replace strangers");
    assert_eq!(greet(&mut node), Err(None));
    assert_eq!(node.connections(), CONNECTIONS_MAX);
    assert!(node.overhead(all[0]).is_none() && node.overhead(all[5]).is_none());
    assert!(node.overhead(all[1]).is_some());
}

/// Returns the CPU time of one run: the lowest of 5 averages, each over 4,000 runs.
fn cpu(mut run: impl FnMut()) -> Duration {
    const TIMES: u32 = 20_000;
    let spent = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    // The minimum of several measurements, since others use the machine as well.
    let spells = (0..5).map(|_| {
        let began = spent();
        (0..TIMES / 5).for_each(|_| run());
        (spent() - began) / (TIMES / 5)
    });
    spells.min().expect("several measurements")
}

/// Prints the figures for docs/decisions/0015-sealed-datagrams.md:
/// `cargo test --release -p farside-fabrics --lib cost -- --ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn the_cost_of_a_seal() {
    use ring::aead::{AES_128_GCM, CHACHA20_POLY1305};
    use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
    for algorithm in [&AES_256_GCM, &AES_128_GCM, &CHACHA20_POLY1305] {
        let key =
            LessSafeKey::new(UnboundKey::new(algorithm, &SECRET[..algorithm.key_len()]).expect("a key"));
        for len in [64, 600, 1420, 8192] {
            let (mut bytes, mut counter, aad) = (vec![1; len], 0, Aad::from([0; HEADER]));
            let mut seal = |bytes: &mut Vec<u8>| {
                bytes.truncate(len);
                counter += 1;
                key.seal_in_place_append_tag(nonce(counter), aad, bytes).expect("a short datagram");
                counter
            };
            let sealed = cpu(|| {
                seal(&mut bytes);
            });
            let both = cpu(|| {
                let counter = seal(&mut bytes);
                key.open_in_place(nonce(counter), aad, &mut bytes).expect("an intact datagram");
            });
            println!("{algorithm:?}, {len} bytes: sealed {sealed:?}, and opened {both:?}");
        }
    }
    let (mut client, mut node, _) = connected();
    for len in [24, 600, 1420, 8192] {
        let (said, mut out) = (datagram(packet::Kind::Data, len), Vec::new());
        let spent = cpu(|| {
            out.clear();
            client.seal(&said, &mut out);
            assert!(matches!(node.open(at(HERE), &mut out), Arrived::Datagram(..)));
        });
        println!("by a connection, {len} bytes: copied, sealed and opened {spent:?}");
    }
    println!("seals of a connection: {} bytes", size_of::<Sealer>() + size_of::<Opener>());
    println!("both ends of a connection are made in {:?}", cpu(|| drop(connected())));
    let wrong = seal(&mut Client::new(Shared::new([9; 32]), draws(1)), &hello(72));
    let mut bytes = wrong.clone();
    let refused = cpu(|| {
        bytes.copy_from_slice(&wrong);
        assert!(matches!(node.open(at(HERE), &mut bytes), Arrived::Outsider(..)));
    });
    println!("a greeting does not open in {refused:?}");
    // The cost of forward secrecy per end.
    let rng = ring::rand::SystemRandom::new();
    let draw = || EphemeralPrivateKey::generate(&X25519, &rng).expect("random bytes");
    let peer = UnparsedPublicKey::new(&X25519, draw().compute_public_key().expect("a key"));
    let agreed = cpu(|| {
        let ours = draw();
        ours.compute_public_key().expect("a key");
        agree_ephemeral(ours, &peer, |_| ()).expect("a key");
    });
    println!("X25519, a key pair and an agreement: {agreed:?}");
}
