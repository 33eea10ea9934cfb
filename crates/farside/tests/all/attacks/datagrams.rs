//! Datagrams that no Farside client sends: truncated, damaged, replayed, forged, with future numbers, or with fragments
//! that contradict each other.

use crate::attacks::bytes::*;
use crate::attacks::peer::{PATIENCE, Raw, SILENCE, Session, Store, random};
use crate::attacks::target::{Target, Witness};
use crate::attacks::{on_each_carrier, on_each_carrier_and_device};

on_each_carrier_and_device![
    truncated_datagrams_run_nothing,
    datagrams_with_a_damaged_byte_do_no_harm,
    wrong_directions_and_versions_are_refused,
    lengths_that_lie_are_refused,
    a_replayed_request_runs_once_and_never_from_elsewhere,
    guessed_sessions_and_secrets_open_nothing,
    future_numbers_and_slots_beyond_the_window_run_nothing,
    fragments_in_any_order_form_one_request_if_they_agree,
    a_client_that_exceeds_its_credit_does_not_grow_the_node,
    foreign_buffers_cannot_be_retired,
    questions_that_are_none_are_refused,
];

/// A node under attack over one carrier, and a word that counts the chains that ran.
struct Scene {
    target: Target,
    witness: Witness,
    carrier: &'static str,
    session: Session,
    store: Store,
    word: u64,
    runs: u64,
}

impl Scene {
    fn new(carrier: &'static str) -> Scene {
        let target = Target::start();
        let witness = target.witness(carrier);
        let mut session = Session::open(target.url(carrier));
        let store = session.store("default");
        let word = session.buffer(&store, &[0; 64]);
        Scene { target, witness, carrier, session, store, word, runs: 0 }
    }

    /// Returns a chain that increments the word by 1.
    fn counting(&self) -> Vec<u8> {
        chain(self.store.key, &[fetch_add(self.word, 1)])
    }

    /// Asserts that the incrementing chain ran `times` times since the last check.
    #[track_caller]
    fn assert_has_run(&mut self, times: u64) {
        self.runs += times;
        let reply = self.session.chain(self.store.key, &[read(self.word, 8)]);
        assert_eq!(reply.statuses(), [OK]);
        assert_eq!(u64_at(reply.output(0), 0), self.runs, "number of chains that ran");
    }

    /// Returns one well-formed datagram of each kind, with numbers that slots 1 and up of this session have not used.
    fn one_of_each(&self) -> Vec<Vec<u8>> {
        let chain = self.counting();
        let call = [&[0; 8], &br#""node_info""#[..]].concat();
        let retire = [u64::from(self.store.key.0), 0].map(u64::to_le_bytes).concat();
        let have = [0; 16];
        let of = |entry: Entry<'_>| self.session.datagram(DATA, &entry.bytes());
        vec![
            self.session.hello.clone(),
            of(Entry::whole(CHAIN, 1, 1, &chain)),
            of(Entry::whole(CALL, 2, 1, &call)),
            of(Entry::whole(RETIRE, 3, 1, &retire)),
            of(Entry::whole(HAVE, 0, self.session.numbers[0], &have)),
            of(Entry::whole(CANCEL, 4, 1, b"")),
            self.session.datagram(PING, &[]),
            self.session.datagram(BYE, &[]),
        ]
    }

    /// Sends bad datagrams, in batches that fit into a socket's buffer. Returns their number.
    #[track_caller]
    fn send_all<'a>(&mut self, bad: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut sent = 0;
        for bytes in bad {
            self.session.raw.send(bytes);
            sent += 1;
            if sent % 32 == 0 {
                assert!(self.session.sync(), "the session is alive");
            }
        }
        assert!(self.session.sync(), "the session is alive");
        sent
    }

    fn assert_nothing_left(self) {
        self.witness.assert_well();
        let before = self.target.now();
        drop((self.session, self.witness));
        self.target.assert_as_before(before);
    }
}

fn truncated_datagrams_run_nothing(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let mut bad = Vec::new();
    for whole in scene.one_of_each() {
        for len in 0..whole.len() {
            // A header alone is a valid DATA without entries.
            if len == HEADER && whole[3] == DATA {
                continue;
            }
            let mut cut = whole[..len].to_vec();
            bad.push(cut.clone());
            seal(&mut cut);
            bad.push(cut);
        }
    }
    let before = scene.target.count("engine_malformed_total");
    let sent = scene.send_all(bad.iter().map(Vec::as_slice));
    scene.target.reaches("engine_malformed_total", before + sent * 9 / 10);
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn datagrams_with_a_damaged_byte_do_no_harm(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let before = scene.target.count("engine_malformed_total");
    let mut damaged = Vec::new();
    for whole in scene.one_of_each() {
        // One in 97 of the zeros that pad a HELLO is enough.
        for at in (0..whole.len()).filter(|&at| at < 200 || at % 97 == 0) {
            for damage in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= damage;
                damaged.push(bytes);
            }
        }
    }
    if !scene.session.raw.is_reliable() {
        // The checksum detects damage to any byte.
        let sent = scene.send_all(damaged.iter().map(Vec::as_slice));
        scene.target.reaches("engine_malformed_total", before + sent * 9 / 10);
        scene.assert_has_run(0);
    }
    // With a corrected checksum each is another request. It may run, with the rights of its session only.
    for (nth, mut bytes) in damaged.into_iter().enumerate() {
        seal(&mut bytes);
        scene.session.raw.send(&bytes);
        if nth % 32 == 0 {
            scene.witness.assert_well();
        }
        // The damaged datagram may be a BYE, or a HELLO that ends the session.
        if nth % 16 == 0 && !scene.session.sync() {
            scene.session = Session::open(scene.target.url(carrier));
        }
    }
    scene.target.reaches("engine_malformed_total", before + 100);
    scene.assert_nothing_left();
}

fn wrong_directions_and_versions_are_refused(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let before = scene.target.count("engine_malformed_total");
    let mut bad = Vec::new();
    for kind in (0..=255).filter(|kind| ![HELLO, DATA, PING, BYE].contains(kind)) {
        bad.push(scene.session.datagram(kind, &[]));
        bad.push(scene.session.datagram(kind, &[0; 48]));
    }
    for at in 0..2 {
        let mut other = scene.session.datagram(PING, &[]);
        other[at] ^= 0x20; // Another magic.
        seal(&mut other);
        bad.push(other);
    }
    for kind in [0].into_iter().chain(7..=255) {
        bad.push(scene.session.datagram(DATA, &Entry::whole(kind, 0, 9, &[0; 16]).bytes()));
    }
    bad.push(scene.session.datagram(PING, &[0; 8]));
    bad.push(scene.session.datagram(BYE, &[0; 8]));
    let sent = scene.send_all(bad.iter().map(Vec::as_slice));
    scene.target.reaches("engine_malformed_total", before + sent * 9 / 10);
    // An entry that only a node sends.
    let before = scene.target.count("engine_disallowed_total");
    assert!(scene.session.data(&[Entry::whole(REPLY, 0, scene.session.numbers[0], &[0; 8])]));
    assert!(scene.session.sync());
    scene.target.reaches("engine_disallowed_total", before + 1);
    // Another version: the refusal names both versions.
    for version in [0, 1, 255] {
        let mut hello = hello(7, 1, 7, b"");
        hello[2] = version;
        seal(&mut hello);
        let mut stranger = Raw::connect(scene.target.url(carrier));
        stranger.send(&hello);
        let refused = stranger.receive(PATIENCE).expect("a reason");
        let reason = String::from_utf8_lossy(&refused[HEADER..]).into_owned();
        assert_eq!((refused[3], u64_at(&refused, 8)), (REFUSED, 7));
        assert!(reason.contains(&format!("version {version}")) && reason.contains("speaks 2"), "{reason}");
        // A short datagram of another version gets no response, so that a forged source address gains nothing.
        stranger.send(&hello[..1199]);
        assert_eq!(stranger.receive(SILENCE), None);
    }
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn lengths_that_lie_are_refused(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let chain = scene.counting();
    let good = Entry::whole(CHAIN, 1, 1, &chain);
    let mut bad = Vec::new();
    for lie in [0, 1, good.len - 1, good.len + 1, good.len + 8, 0xffff, 1 << 31, u32::MAX - 7, u32::MAX] {
        bad.push(Entry { len: lie, ..good });
        bad.push(Entry { size: lie, ..good });
        bad.push(Entry { len: lie, size: lie, ..good });
        bad.push(Entry { kind: CALL, len: lie, size: lie, ..good });
    }
    for count in [0, 2, 64, 65, 255] {
        bad.push(Entry { count, ..good });
        bad.push(Entry { index: count, ..good });
        bad.push(Entry { index: count, count, ..good });
    }
    // A RETIRE entry has a multiple of 16 bytes.
    bad.push(Entry::whole(RETIRE, 1, 1, &[0; 23]));
    bad.push(Entry::whole(CALL, 1, 1, &[0; 7]));
    bad.push(Entry::whole(CANCEL, 1, 1, &[0; 8]));
    bad.push(Entry::whole(HAVE, 1, 1, &[0; 8]));
    // Some of these values are true: removes them.
    let is_true = |entry: &Entry<'_>| entry.len == good.len && entry.size == good.len && entry.count == 1;
    bad.retain(|entry| !(is_true(entry) && entry.index == 0));
    let before = scene.target.count("engine_malformed_total");
    let bad: Vec<Vec<u8>> = bad.iter().map(|entry| scene.session.datagram(DATA, &entry.bytes())).collect();
    let sent = scene.send_all(bad.iter().map(Vec::as_slice));
    scene.target.reaches("engine_malformed_total", before + sent * 9 / 10);
    // Wrong lengths in a HELLO.
    for (at, lie) in
        [(24 + 32, 0), (24 + 32, 1199), (24 + 32, 65508), (24 + 32, u32::MAX), (24 + 40, u32::MAX)]
    {
        let mut hello = hello(u128::from(random()), 1, 7, b"");
        hello[at..at + 4].copy_from_slice(&u32::to_le_bytes(lie));
        seal(&mut hello);
        let mut stranger = Raw::connect(scene.target.url(carrier));
        stranger.send(&hello);
        assert_eq!(stranger.receive(SILENCE), None, "{lie} at {at}");
    }
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn a_replayed_request_runs_once_and_never_from_elsewhere(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let counting = scene.counting();
    let number = scene.session.request(CHAIN, 5, &counting);
    scene.session.reply(5, number, PATIENCE).expect("a reply");
    scene.runs = 1;
    let again = scene.session.datagram(DATA, &Entry::whole(CHAIN, 5, number, &counting).bytes());
    let before = scene.target.count("engine_duplicates_total");
    scene.send_all([&again[..]; 64]);
    scene.target.reaches("engine_duplicates_total", before + 60);
    scene.assert_has_run(0);
    // From another address, with the right secrets.
    let mut thief = Raw::connect(scene.target.url(carrier));
    let next = scene.session.datagram(DATA, &Entry::whole(CHAIN, 5, number + 1, &counting).bytes());
    let cancel = scene.session.datagram(DATA, &Entry::whole(CANCEL, 5, number + 1, b"").bytes());
    let before = scene.target.count("engine_disallowed_total");
    for bytes in
        [&again, &next, &cancel, &scene.session.datagram(PING, &[]), &scene.session.datagram(BYE, &[])]
    {
        thief.send(bytes);
        assert_eq!(thief.receive(SILENCE), None, "the thief gets no response");
    }
    scene.target.reaches("engine_disallowed_total", before + 5);
    scene.assert_has_run(0);
    // The session's HELLO from another address: a welcome would reveal the secret.
    let before = scene.target.settled("engine_sessions_opened_total");
    for _ in 0..10 {
        thief.send(&scene.session.hello);
        let answer = thief.receive(PATIENCE).expect("a reason");
        assert_eq!(answer[3], REFUSED);
        assert!(!answer.windows(8).any(|bytes| bytes == scene.session.secret.to_le_bytes()));
    }
    // From its own address, the HELLO gets the same welcome again.
    scene.session.raw.send(&scene.session.hello);
    let welcome = scene.session.raw.receive(PATIENCE).expect("a welcome");
    assert_eq!((welcome[3], u64_at(&welcome, 24)), (WELCOME, scene.session.secret));
    // A replayed RETIRE retires the buffer once.
    let gone = scene.session.buffer(&scene.store, &[1; 64]);
    let retire = [u64::from(scene.store.key.0), gone].map(u64::to_le_bytes).concat();
    let number = scene.session.request(RETIRE, 6, &retire);
    scene.session.reply(6, number, PATIENCE).expect("an answer");
    let before_retired = scene.target.settled("retired_buffers_total");
    for _ in 0..20 {
        scene.session.send_again(RETIRE, 6, number, &retire);
    }
    assert!(scene.session.sync());
    assert_eq!(scene.target.settled("retired_buffers_total"), before_retired);
    // A cancelled number never runs, however often it is sent.
    let cancelled = scene.session.numbers[5] + 1;
    scene.session.data(&[Entry::whole(CANCEL, 5, cancelled, b"")]);
    scene.session.numbers[5] = cancelled;
    let late = scene.session.datagram(DATA, &Entry::whole(CHAIN, 5, cancelled, &counting).bytes());
    scene.send_all([&late[..]; 20]);
    scene.assert_has_run(0);
    assert_eq!(scene.target.settled("engine_sessions_opened_total"), before, "no other session was opened");
    // After BYE, each request gets a GONE, and the HELLO is refused.
    let old = scene.session.datagram(DATA, &Entry::whole(CHAIN, 5, cancelled + 1, &counting).bytes());
    let (number, hello) = (scene.session.number, scene.session.hello.clone());
    scene.session.say(BYE);
    for bytes in [&old, &old, &old] {
        scene.session.raw.send(bytes);
        let gone = scene.session.raw.receive(PATIENCE).expect("an answer");
        assert_eq!((gone[3], u32_at(&gone, 4)), (GONE, number));
    }
    scene.session.raw.send(&hello);
    let refused = scene.session.raw.receive(PATIENCE).expect("an answer");
    assert_eq!(refused[3], REFUSED);
    assert!(String::from_utf8_lossy(&refused[HEADER..]).contains("is over"));
    let word = (scene.word, scene.runs);
    scene.session = Session::open(scene.target.url(scene.carrier));
    scene.store = scene.session.store("default");
    let reply = scene.session.chain(scene.store.key, &[read(word.0, 8)]);
    assert_eq!(u64_at(reply.output(0), 0), word.1);
    scene.assert_nothing_left();
}

fn guessed_sessions_and_secrets_open_nothing(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let counting = scene.counting();
    let body = Entry::whole(CHAIN, 1, 1, &counting).bytes();
    let before = scene.target.count("engine_bad_secrets_total");
    let (number, secret) = (scene.session.number, scene.session.secret);
    let near = (0..64).map(|bit| secret ^ 1 << bit).chain([0, u64::MAX, secret.wrapping_add(0x100)]);
    let guesses: Vec<Vec<u8>> =
        near.chain((0..1000).map(|_| random())).map(|guess| datagram(DATA, number, guess, &body)).collect();
    let sent = scene.send_all(guesses.iter().map(Vec::as_slice));
    scene.target.reaches("engine_bad_secrets_total", before + sent * 9 / 10);
    // DATA, PING and BYE with guessed numbers from another address: a response has at most as many bytes as a request.
    let mut stranger = Raw::connect(scene.target.url(carrier));
    for nth in 0..200_u32 {
        let kind = [DATA, PING, BYE][nth as usize % 3];
        stranger.send(&datagram(kind, number.wrapping_add(nth << 16), random(), &[]));
        stranger.send(&datagram(kind, nth, random(), &[]));
        stranger.send(&datagram(kind, random() as u32, random(), &[]));
    }
    let mut answered = 0;
    while let Some(answer) = stranger.receive(SILENCE) {
        assert_eq!((answer[3], answer.len()), (GONE, HEADER), "a GONE reveals nothing else");
        answered += 1;
    }
    assert!(answered > 0);
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn future_numbers_and_slots_beyond_the_window_run_nothing(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let counting = scene.counting();
    let before = scene.target.count("engine_disallowed_total");
    let mut bad = Vec::new();
    for kind in [CHAIN, CALL, RETIRE, CANCEL] {
        let payload: &[u8] = match kind {
            CHAIN => &counting,
            CALL => &[0; 8],
            _ => b"",
        };
        for number in [2, 3, 1000, i32::MAX as u32] {
            bad.push(scene.session.datagram(DATA, &Entry::whole(kind, 9, number, payload).bytes()));
        }
    }
    let sent = scene.send_all(bad.iter().map(Vec::as_slice));
    scene.target.reaches("engine_disallowed_total", before + sent * 9 / 10);
    let before = scene.target.count("engine_malformed_total");
    let bad: Vec<Vec<u8>> = [64, 65, 128, 255]
        .map(|slot| scene.session.datagram(DATA, &Entry::whole(CHAIN, slot, 1, &counting).bytes()))
        .into();
    scene.send_all(bad.iter().map(Vec::as_slice));
    scene.target.reaches("engine_malformed_total", before + 4);
    // Numbers from the past, which wrap.
    let bad: Vec<Vec<u8>> = [0, 1 << 31, u32::MAX - 1, u32::MAX]
        .map(|number| scene.session.datagram(DATA, &Entry::whole(CHAIN, 9, number, &counting).bytes()))
        .into();
    scene.send_all(bad.iter().map(Vec::as_slice));
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn fragments_in_any_order_form_one_request_if_they_agree(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    // A request of several fragments that counts once.
    let room = scene.session.buffer(&scene.store, &[0; 8000]);
    let long = chain(scene.store.key, &[fetch_add(scene.word, 1), write(room, &[7; 8000])]);
    let count = long.len().div_ceil(CHUNK);
    let mut other = long.clone();
    other.truncate(long.len() - CHUNK);
    let before = scene.target.count("engine_disallowed_total");
    for (slot, order) in [(1, [6, 5, 4, 3, 2, 1, 0]), (2, [3, 0, 6, 1, 5, 2, 4])] {
        for (sent, index) in order.into_iter().enumerate() {
            let part = Entry::part(CHAIN, slot, 1, &long, index);
            assert!(scene.session.data(&[part, part]), "doubled");
            if sent < count - 1 {
                // Fragments of another size, of another kind, or of a number that has not started.
                scene.session.data(&[Entry::part(CHAIN, slot, 1, &other, 1)]);
                scene.session.data(&[Entry::part(CALL, slot, 1, &long, 0)]);
                scene.session.data(&[Entry::part(CHAIN, slot, 2, &long, 0)]);
                scene.session.data(&[Entry::whole(CHAIN, slot, 2, &long[..8])]);
            }
        }
        scene.session.numbers[usize::from(slot)] = 1;
        if scene.session.raw.is_reliable() {
            assert!(scene.session.reply(slot, 1, PATIENCE).is_some());
        }
        scene.session.send_again(CHAIN, slot, 1, &long);
        assert!(scene.session.sync());
        scene.assert_has_run(1);
    }
    scene.target.reaches("engine_disallowed_total", before + 20);
    // An incomplete request never runs, and its bytes are freed with the session.
    for index in 1..count {
        scene.session.data(&[Entry::part(CHAIN, 3, 1, &long, index)]);
    }
    assert!(scene.session.sync());
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn a_client_that_exceeds_its_credit_does_not_grow_the_node(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let before = (scene.target.count("engine_disallowed_total"), scene.target.resident_kib());
    let message = vec![0; 65_536];
    let count = message.len().div_ceil(CHUNK);
    for _ in 0..3 {
        for slot in 1..64 {
            for index in 0..count - 1 {
                scene.session.data(&[Entry::part(CHAIN, slot, 1, &message, index)]);
            }
            assert!(scene.session.sync());
        }
    }
    scene.target.reaches("engine_disallowed_total", before.0 + 1000);
    let grown = scene.target.resident_kib().saturating_sub(before.1);
    println!("{carrier}: 12 MB of half-sent requests: the node grew by {grown} KiB");
    assert!(grown < 8 << 10, "the node grew by {grown} KiB");
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}

fn foreign_buffers_cannot_be_retired(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let mut other = Session::open(scene.target.url(carrier));
    let theirs = other.store("witness");
    let buffer = other.buffer(&theirs, &[5; 64]);
    let (key, word) = (scene.store.key, scene.word);
    let live = scene.target.stat("witness")["live_buffers"].as_u64();
    let table = scene.store.table_at;
    let freed = scene.session.buffer(&scene.store, &[1; 64]);
    let one = |region: u32, at: u64| [u64::from(region), at].map(u64::to_le_bytes).concat();
    let retired = scene.target.settled("retired_buffers_total");
    let shown = other.store("default");
    let neighbour = other.buffer(&shown, &[6; 64]);
    let (key, theirs_key) = (key.0, theirs.key.0);
    let hostile = [
        (key, neighbour),     // Another session's buffer in the same store.
        (key, buffer),        // A buffer of another store, claimed for this one.
        (theirs_key, buffer), // A buffer of a store that this session has not opened.
        (theirs_key, word),   // The own buffer, claimed for another store.
        (0, word),
        (key + 1, word),
        (u32::MAX, word),
        (key, 0), // Addresses of no buffer: header, table, between buffers, beyond the memory.
        (key, 64),
        (key, 4096),
        (key, table),
        (key, word + 8),
        (key, word - 16),
        (key, word + 1),
        (key, 1 << 62),
        (key, SCRATCH),
        (key, u64::MAX),
        (key, u64::MAX - 7),
    ];
    let all: Vec<u8> = hostile.iter().flat_map(|&(key, at)| one(key, at)).collect();
    for _ in 0..2 {
        scene.session.round_trip(RETIRE, 7, &all);
    }
    assert_eq!(scene.target.settled("retired_buffers_total"), retired);
    // Retired twice: only the first time counts.
    let twice = [one(key, freed), one(key, freed)].concat();
    scene.session.round_trip(RETIRE, 7, &twice);
    scene.session.round_trip(RETIRE, 7, &twice);
    scene.target.reaches("retired_buffers_total", retired + 1);
    assert_eq!(scene.target.settled("retired_buffers_total"), retired + 1);
    // All buffers are still live, and the word still belongs to this session.
    assert_eq!(scene.target.stat("witness")["live_buffers"].as_u64(), live);
    assert_eq!(other.chain(theirs.key, &[read(buffer, 64)]).output(0), [5; 64]);
    assert_eq!(other.chain(shown.key, &[read(neighbour, 64)]).output(0), [6; 64]);
    scene.assert_has_run(0);
    drop(other);
    scene.assert_nothing_left();
}

fn questions_that_are_none_are_refused(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let mut questions = vec![
        String::new(),
        "null".into(),
        "\"frob\"".into(),
        "[".repeat(50_000),
        "{".repeat(50_000),
        r#"{"open_store":{"name":"default","more":1}}"#.into(),
        r#"{"open_store":{"name":"../default"}}"#.into(),
        format!(r#"{{"open_store":{{"name":"{}"}}}}"#, "x".repeat(50_000)),
        format!(r#"{{"open_store":{{"name":"{}"}}}}"#, "\\u0001".repeat(8000)),
        r#"{"drop_store":{"name":"none"}}"#.into(),
        r#"{"create_store":{"name":"s","kind":"frob","quota":1048576,"parameters":"{}"}}"#.into(),
        r#"{"create_store":{"name":"s","kind":"prism-kv","quota":18446744073709551615,"parameters":"{}"}}"#
            .into(),
    ];
    questions
        .extend((0..35).map(|len| r#"{"open_store":{"name":"default"}}"#[..len.min(33)].to_owned()).take(33));
    for question in &questions {
        let reason = scene.session.call(question).expect_err("an invalid request");
        assert!(!reason.is_empty() && reason.len() <= 4096, "{} bytes", reason.len());
    }
    for service in [1, 7, u32::MAX - 1] {
        let answer = scene.session.round_trip(CALL, 0, &[&service.to_le_bytes()[..], &[0; 4]].concat());
        let reason = String::from_utf8_lossy(&answer[1..]).into_owned();
        assert!(answer[0] == 0xff && reason.contains(&service.to_string()), "{reason}");
    }
    // More calls at once than the engine queues: each gets a response, the excess ones a refusal.
    let ask = [&[0; 8], &br#"{"store_stat":{"name":"default"}}"#[..]].concat();
    for slot in 1..64 {
        scene.session.request(CALL, slot, &ask);
    }
    assert!(scene.session.sync());
    scene.assert_has_run(0);
    scene.assert_nothing_left();
}
