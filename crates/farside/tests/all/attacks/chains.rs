//! Chains that try to access foreign memory: with wrong keys, wrong addresses or hostile pointers, or after the store
//! was dropped.

use crate::attacks::bytes::*;
use crate::attacks::peer::{PATIENCE, Session, Store, list_for, random};
use crate::attacks::target::{SECRET, Target, Witness, contains_secret};
use crate::attacks::{on_each_carrier, on_each_carrier_and_device};
use crate::support::until;

on_each_carrier_and_device![
    keys_of_other_sessions_open_nothing,
    addresses_outside_its_store_are_refused,
    pointers_that_lead_outside_are_not_followed,
    invalid_ops_are_refused_or_do_nothing,
    chains_that_lie_about_themselves_do_not_run,
    a_bound_that_keeps_changing_reveals_nothing_else,
    keys_of_a_dropped_store_open_nothing,
    a_full_store_is_reported_and_affects_no_other_store,
];

/// An attacker with a store of its own, and another tenant.
struct Scene {
    target: Target,
    witness: Witness,
    /// The attacker's session and store.
    session: Session,
    store: Store,
    /// Address of a buffer of 256 bytes in the attacker's store.
    own: u64,
    /// The other tenant's session and store, and the address of one of its buffers.
    other: Session,
    theirs: Store,
    their_buffer: u64,
    /// Number of chains so far. Every 64 chains, a PING keeps the other tenant's session alive.
    beat: u64,
}

impl Scene {
    fn new(carrier: &'static str) -> Scene {
        let target = Target::start();
        let witness = target.witness(carrier);
        let mut session = Session::open(target.url(carrier));
        let store = session.store("default");
        let own = session.buffer(&store, &[1; 256]);
        let mut other = Session::open(target.url(carrier));
        let theirs = other.store("witness");
        let their_buffer = other.buffer(&theirs, &SECRET.repeat(16));
        Scene { target, witness, session, store, own, other, theirs, their_buffer, beat: 0 }
    }

    /// Runs a chain of one op and returns its status. Asserts that the reply holds no byte of another tenant.
    #[track_caller]
    fn status(&mut self, op: Op) -> u8 {
        self.status_by(self.store.key, op)
    }

    #[track_caller]
    fn status_by(&mut self, key: (u32, u64), op: Op) -> u8 {
        self.beat += 1;
        if self.beat.is_multiple_of(64) {
            self.other.keep_alive();
        }
        let reply = self.session.round_trip(CHAIN, 0, &chain(key, &[op]));
        assert!(!contains_secret(&reply), "the reply holds another tenant's bytes");
        ChainReply::of(&reply, 1).statuses()[0]
    }

    /// Asserts that the other tenant's data are unchanged, and that the node holds no session or descriptor of the
    /// attack.
    #[track_caller]
    fn assert_untouched(mut self) {
        let reply = self.other.chain(self.theirs.key, &[read(self.their_buffer, 256)]);
        assert_eq!(reply.output(0), SECRET.repeat(16));
        self.witness.assert_well();
        let before = self.target.now();
        drop((self.session, self.other, self.witness));
        self.target.assert_as_before(before);
    }
}

/// Returns keys that no node gave to a session with `key`, in the same order for every session.
fn wrong_keys(key: (u32, u64), theirs: (u32, u64)) -> Vec<(u32, u64)> {
    let mut keys = vec![
        (0, 0),
        (key.0, 0),
        (key.0, u64::MAX),
        (0, key.1),
        (u32::MAX, key.1),
        theirs,            // Another session's key.
        (theirs.0, key.1), // The own secret with another region.
        (key.0, theirs.1),
    ];
    let steps = [0x100, 0x1_0000, 1, 7].iter();
    keys.extend(
        steps.flat_map(|step| [(key.0, key.1.wrapping_add(*step)), (key.0, key.1.wrapping_sub(*step))]),
    );
    keys.extend((0..64).map(|bit| (key.0, key.1 ^ 1 << bit)));
    keys.extend((0..16).filter(|&region| region != key.0).map(|region| (region, key.1)));
    keys.extend((0..200).map(|_| (key.0, random())));
    keys
}

fn keys_of_other_sessions_open_nothing(carrier: &'static str) {
    /// Number of wrong keys per session. With 4 chains per key, it stays below the limit: the node ends a session after
    /// 16 chains with wrong keys.
    const KEYS_A_SESSION: usize = 3;
    let mut scene = Scene::new(carrier);
    let (own, first_key, theirs) = (scene.own, scene.store.key, scene.theirs.key);
    let refused = scene.target.count("refused_total");
    let guesses = wrong_keys(first_key, theirs).len();
    for from in (0..guesses).step_by(KEYS_A_SESSION) {
        if from > 0 {
            scene.session = Session::open(scene.target.url(carrier));
            scene.store = scene.session.store("default");
        }
        let key = scene.store.key;
        assert!(from == 0 || key != first_key, "every session has a key of its own");
        for &wrong in wrong_keys(key, theirs).iter().skip(from).take(KEYS_A_SESSION) {
            for op in [read(own, 8), write(own, &[9; 8]), fetch_add(own, 1), cas(own, 8, &[1; 8], &[9; 8])] {
                assert_eq!(scene.status_by(wrong, op), ACCESS, "{wrong:x?}");
            }
        }
        // An earlier session's key opens nothing in the next session.
        if from > 0 {
            assert_eq!(scene.status_by(first_key, read(own, 8)), ACCESS);
        }
        let reply = scene.session.chain(key, &[read(own, 256)]);
        assert_eq!(reply.output(0), [1; 256]);
    }
    scene.target.reaches("refused_total", refused + 4 * guesses as u64);
    scene.assert_untouched();
}

/// Addresses outside the attacker's store.
fn foreign_addresses(scene: &Scene) -> Vec<u64> {
    let memory = 96 << 20;
    let segment = 1 << 20;
    let mut all = vec![
        0,
        8,
        16,
        64,
        4096,
        65_536, // The node's own records.
        scene.their_buffer,
        scene.theirs.table_at,
        scene.theirs.table_at + scene.theirs.table_len - 8,
        scene.their_buffer / segment * segment, // The states of the segment's buffers.
        scene.own / segment * segment,
        scene.own / segment * segment + 64,
        memory - 8,
        memory,
        memory + 8,
        1 << 40,
        1 << 62,
        (1 << 63) - 8,
        u64::MAX - 7,
        u64::MAX - 255,
        u64::MAX,
    ];
    // Every segment, except those of the attacker's table and buffers.
    let table = scene.store.table_at..scene.store.table_at + scene.store.table_len;
    let own = |at: &u64| table.contains(at) || at / segment == scene.own / segment;
    all.extend((0..96).map(|index| index * segment + segment / 2).filter(|at| !own(at)));
    all
}

fn addresses_outside_its_store_are_refused(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let refused = scene.target.count("refused_total");
    let mut tried = 0;
    for at in foreign_addresses(&scene) {
        for op in [read(at, 8), read(at, 0x7fff_ffff), write(at, &[0; 8]), fetch_add(at, 1)] {
            let status = scene.status(op);
            // The segment may be granted to the attacker's store and still unused: then access is allowed.
            let is_own = status == OK;
            assert!(is_own || [ACCESS, INVALID, TOO_LONG].contains(&status), "{status} at {at:#x}");
            let is_known_foreign = !(1 << 16..96 << 20).contains(&at)
                || at == scene.their_buffer
                || (scene.theirs.table_at..scene.theirs.table_at + scene.theirs.table_len).contains(&at);
            assert!(!(is_own && is_known_foreign), "{at:#x}");
            tried += u64::from(status == ACCESS);
        }
    }
    scene.target.reaches("refused_total", refused + tried);
    // Up to the table's ends, and beyond them.
    let (at, len) = (scene.store.table_at, scene.store.table_len);
    assert_eq!(scene.status(read(at + len - 8, 8)), OK);
    for (at, len) in [(at - 1, 1), (at - 8, 8), (at - 8, 16), (at + len - 7, 8), (at + len, 1)] {
        let status = scene.status(read(at, len));
        assert!(
            status == ACCESS || status == INVALID || at >= scene.store.table_at + scene.store.table_len,
            "{status}"
        );
    }
    // Words that are not aligned.
    for by in 1..8 {
        let at = scene.own + by;
        assert_eq!(scene.status(fetch_add(at, 1)), INVALID);
        assert_eq!(scene.status(cas(at, 8, &[1; 8], &[2; 8])), INVALID);
        assert_eq!(scene.status(cas(at, 16, &[1; 16], &[2; 16])), INVALID);
    }
    assert_eq!(scene.status(cas(scene.own + 8, 16, &[1; 16], &[2; 16])), INVALID);
    scene.assert_untouched();
}

fn pointers_that_lead_outside_are_not_followed(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let freed = scene.session.buffer(&scene.store, &[1; 64]);
    let retire = [u64::from(scene.store.key.0), freed].map(u64::to_le_bytes);
    scene.session.round_trip(RETIRE, 1, &retire.concat());
    let pointer_at = scene.session.buffer(&scene.store, &[0; 16]);
    let known = [
        scene.their_buffer,
        scene.theirs.table_at,
        0,
        8,
        64,
        4096,
        96 << 20,
        SCRATCH,
        SCRATCH + 31,
        u64::MAX,
    ];
    let mut leads: Vec<u64> = foreign_addresses(&scene);
    leads.extend(known);
    for leads_to in leads {
        for bound in [0, 8, 256, 1 << 20, u32::MAX] {
            let pointer = [&leads_to.to_le_bytes()[..], &bound.to_le_bytes(), &[0xff; 4]].concat();
            assert_eq!(scene.status(write(pointer_at, &pointer)), OK);
            let indirect = [
                read(pointer_at, 8).with(TARGET_INDIRECT),
                read(pointer_at, 60_000).with(TARGET_INDIRECT | BOUNDED),
                write(pointer_at, &[3; 8]).with(TARGET_INDIRECT),
                write(pointer_at, &[3; 8]).with(TARGET_INDIRECT | BOUNDED),
            ];
            for op in indirect {
                let status = scene.status(op);
                if known.contains(&leads_to) && bound > 0 && leads_to & SCRATCH == 0 {
                    assert!([ACCESS, NULL_POINTER, INVALID].contains(&status), "{status} by {leads_to:#x}");
                }
            }
        }
    }
    // A pointer to itself: exactly one level is followed.
    let itself = [&pointer_at.to_le_bytes()[..], &16_u32.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(scene.status(write(pointer_at, &itself)), OK);
    let reply = scene.session.chain(scene.store.key, &[read(pointer_at, 16).with(TARGET_INDIRECT | BOUNDED)]);
    assert_eq!(reply.output(0), itself);
    // For any bound, an access ends at the end of the buffer that the pointer leads into.
    let far = [&scene.own.to_le_bytes()[..], &u32::MAX.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(scene.status(write(pointer_at, &far)), OK);
    let reply =
        scene.session.chain(scene.store.key, &[read(pointer_at, 60_000).with(TARGET_INDIRECT | BOUNDED)]);
    assert_eq!(reply.statuses(), [OK]);
    assert!((256..=512).contains(&reply.output(0).len()), "{}", reply.output(0).len());
    // A freed buffer still belongs to its store, so a pointer into it reveals only the store's own bytes.
    let freed = [&freed.to_le_bytes()[..], &64_u32.to_le_bytes(), &[0; 4]].concat();
    assert_eq!(scene.status(write(pointer_at, &freed)), OK);
    let _own_bytes = scene.status(read(pointer_at, 64).with(TARGET_INDIRECT | BOUNDED));
    scene.assert_untouched();
}

fn invalid_ops_are_refused_or_do_nothing(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let (key, own) = (scene.store.key, scene.own);
    // Output redirected to foreign memory, and to a place that is too small.
    for to in
        [scene.their_buffer, scene.theirs.table_at, 0, 8, 96 << 20, u64::MAX, SCRATCH + 32, SCRATCH + 25]
    {
        assert_eq!(scene.status(read(own, 8).by(REDIRECT, to)), ACCESS, "to {to:#x}");
        let status = scene.status(fetch_add(own + 64, 0).by(REDIRECT, to));
        assert_eq!(status, ACCESS, "to {to:#x}");
        let status = scene.status(allocate(list_for(64), &[1; 64]).by(REDIRECT, to));
        assert_eq!(status, ACCESS, "to {to:#x}");
    }
    assert_eq!(scene.session.chain(key, &[read(own, 256)]).output(0), [1; 256], "refused ops change nothing");
    // Data from foreign memory is refused. Data from unwritten scratch is zeros, not bytes of an earlier chain.
    for from in [scene.their_buffer, 0, 8, 96 << 20, u64::MAX, SCRATCH + 32] {
        let copy = Op { code: WRITE, len: 8, at: own, ..Op::default() }.by(DATA_INDIRECT, from);
        assert_eq!(scene.status(copy), ACCESS, "from {from:#x}");
    }
    scene.session.chain(key, &[write(SCRATCH, &[0xee; 32])]);
    let copy = Op { code: WRITE, len: 32, at: own + 128, ..Op::default() }.by(DATA_INDIRECT, SCRATCH);
    let reply = scene.session.chain(key, &[copy, read(own + 128, 32), read(SCRATCH, 32)]);
    assert_eq!((reply.output(1), reply.output(2)), (&[0; 32][..], &[0; 32][..]));
    // Beyond scratch, by a little and by far.
    for at in [SCRATCH + 25, SCRATCH + 32, SCRATCH + (1 << 62), u64::MAX] {
        assert_eq!(scene.status(read(at, 8)), ACCESS, "{at:#x}");
        assert_eq!(scene.status(write(at, &[1; 8])), ACCESS, "{at:#x}");
    }
    // After a refused op, nothing runs. After an op without success, conditional ops are skipped.
    let reply = scene.session.chain(key, &[read(scene.their_buffer, 8), write(own, &[9; 8]), read(own, 8)]);
    assert_eq!(reply.statuses(), [ACCESS, ABORTED, ABORTED]);
    let failed = cas(own, 8, &[0x55; 8], &[9; 8]);
    let reply = scene.session.chain(
        key,
        &[failed, write(own, &[9; 8]).with(CONDITIONAL), write(own, &[8; 8]).with(CONDITIONAL), read(own, 8)],
    );
    assert_eq!(reply.statuses(), [CAS_FAILED, SKIPPED, SKIPPED, OK]);
    assert_eq!(reply.output(3), [1; 8]);
    // More bytes than the list's buffers hold; lists that do not exist.
    assert_eq!(scene.status(allocate(list_for(64), &[1; 4096])), INVALID);
    for list in [1 << 20, u64::from(u32::MAX), u64::MAX, SCRATCH] {
        let status = scene.status(allocate(list, &[1; 8]));
        assert!([ACCESS, INVALID].contains(&status), "{status} of list {list}");
    }
    // More bytes than fit into a reply.
    assert_eq!(scene.status(read(scene.store.table_at, 65_536)), TOO_LONG);
    assert!([TOO_LONG, ACCESS].contains(&scene.status(read(scene.store.table_at, u32::MAX))));
    // Wide words are unsupported here. Masks that select nothing change nothing.
    for width in [24, 32] {
        let compare = vec![1; width];
        assert_eq!(scene.status(cas(own, width as u8, &compare, &compare)), INVALID);
    }
    let masked = [[1_u8; 16], [9; 16], [0xff; 16], [0; 16]].concat();
    let masked = Op { code: CAS, flags: COMPARE | MASKED, width: 16, at: own, rest: masked, ..Op::default() };
    assert_eq!(scene.status(masked), OK);
    assert_eq!(scene.session.chain(key, &[read(own, 16)]).output(0), [1; 16]);
    scene.assert_untouched();
}

fn chains_that_lie_about_themselves_do_not_run(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let (key, own) = (scene.store.key, scene.own + 64);
    let ops = [fetch_add(own, 1), write(own + 8, &[2; 8])];
    let lie = |lie: fn(&mut Claims)| chain_that_claims(key, &ops, lie);
    let mut bad = vec![
        lie(|claims| claims.ops = 0),
        lie(|claims| claims.ops = 1),
        lie(|claims| claims.ops = 3),
        lie(|claims| claims.ops = u16::MAX),
        lie(|claims| claims.bytes = 0),
        lie(|claims| claims.bytes -= 1),
        lie(|claims| claims.bytes += 1),
        lie(|claims| claims.bytes = 1_000_000),
        lie(|claims| claims.bytes = u32::MAX),
        lie(|claims| claims.allocates = 1),
        lie(|claims| claims.allocates = u16::MAX),
        lie(|claims| claims.atomics = 0),
        lie(|claims| claims.atomics = u16::MAX),
        lie(|claims| claims.reserved = 1),
        chain(key, &[]),
        chain(key, &vec![fetch_add(own, 1); 65]),
        chain(key, &vec![fetch_add(own, 1); 1500]),
        chain(key, &vec![allocate(list_for(64), b""); 17]),
        [chain(key, &ops), vec![0]].concat(),
        [chain(key, &ops), chain(key, &ops)].concat(),
        Vec::new(),
        vec![0; 24],
        vec![0xff; 24],
    ];
    let whole = chain(key, &ops);
    bad.extend((0..whole.len()).map(|len| whole[..len].to_vec()));
    let of = |op: Op| chain(key, &[fetch_add(own, 1), op]);
    bad.extend((0..=255).filter(|code| !(1..=5).contains(code)).map(|code| of(Op { code, ..read(own, 8) })));
    bad.push(of(read(own, 8).with(BOUNDED)));
    bad.push(of(read(own, 8).with(0x80)));
    bad.push(of(read(own, 8).with(MASKED)));
    bad.push(of(Op { mode: 6, ..cas(own, 8, &[0; 8], &[0; 8]) }));
    bad.push(of(Op { mode: 1, ..read(own, 8) }));
    bad.extend(
        [0, 1, 4, 7, 9, 15, 33, 64, 255].map(|width| of(Op { width, ..cas(own, 8, &[0; 8], &[0; 8]) })),
    );
    bad.push(of(Op { len: 65_537, ..write(own, &[]) }));
    bad.push(of(Op { len: u32::MAX, ..write(own, &[]) }));
    bad.push(of(Op { len: 8, ..fetch_add(own, 1) }));
    for (nth, bytes) in bad.iter().enumerate() {
        if nth % 100 == 0 {
            scene.other.keep_alive();
        }
        let reply = scene.session.round_trip(CHAIN, 0, bytes);
        let ChainReply::Refused(reason) = ChainReply::of(&reply, 0) else {
            panic!("the chain ran: {}", bytes.escape_ascii())
        };
        assert!(reason.contains("chain") && !reason.contains("0x5"), "{reason}");
    }
    let reply = scene.session.chain(key, &[read(own, 16)]);
    assert_eq!(reply.output(0), [1; 16], "no op of the refused chains ran");
    // The maximum number of ops.
    let reply = scene.session.chain(key, &vec![fetch_add(own, 1); 64]);
    assert_eq!(reply.statuses(), [OK; 64]);
    scene.assert_untouched();
}

fn a_bound_that_keeps_changing_reveals_nothing_else(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let pointer_at = scene.session.buffer(&scene.store, &[0; 16]);
    let honest = [&scene.own.to_le_bytes()[..], &256_u32.to_le_bytes(), &[0; 4]].concat();
    let leads = [scene.their_buffer, scene.own + 255, 0, 8, 96 << 20, u64::MAX, scene.theirs.table_at];
    let mut second = Session::open(scene.target.url(carrier));
    let same = second.store("default");
    let mut came_back = [0_u32; 10];
    for round in 0..600 {
        if round % 100 == 0 {
            scene.other.keep_alive();
        }
        let hostile =
            [&leads[round % leads.len()].to_le_bytes()[..], &u32::MAX.to_le_bytes(), &[0; 4]].concat();
        let flip = if round % 2 == 0 { &honest } else { &hostile };
        // Both requests are in flight at once, in unknown order.
        let wrote = second.request(CHAIN, 3, &chain(same.key, &[write(pointer_at, flip)]));
        let got = scene.session.request(
            CHAIN,
            3,
            &chain(scene.store.key, &[read(pointer_at, 60_000).with(TARGET_INDIRECT | BOUNDED)]),
        );
        // A lost datagram only reduces the number of samples.
        if let Some(reply) = scene.session.reply(3, got, PATIENCE / 20) {
            assert!(!contains_secret(&reply), "the reply holds another tenant's bytes");
            let reply = ChainReply::of(&reply, 1);
            came_back[usize::from(reply.statuses()[0])] += 1;
            let is_own = reply.output(0).iter().all(|&byte| byte == 1 || byte == 0);
            assert!(reply.statuses()[0] != OK || is_own && reply.output(0).len() <= 512);
        }
        let _written = second.reply(3, wrote, PATIENCE / 20);
    }
    println!("{carrier}: of 600, {} read and {} were refused", came_back[0], came_back[usize::from(ACCESS)]);
    assert!(came_back[usize::from(OK)] > 0 && came_back[usize::from(ACCESS)] > 0, "{came_back:?}");
    drop(second);
    scene.assert_untouched();
}

fn keys_of_a_dropped_store_open_nothing(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    scene.session.create("mine", 8 << 20);
    let mine = scene.session.store("mine");
    let buffer = scene.session.buffer(&mine, &[1; 512]);
    let mut dropper = Session::open(scene.target.url(carrier));
    let refused = scene.target.count("refused_total");
    let drop_asked = dropper.request(CALL, 1, &[&[0; 8], &br#"{"drop_store":{"name":"mine"}}"#[..]].concat());
    let mut statuses = [0_u32; 10];
    let ops = [read(buffer, 512), write(buffer, &[2; 8]), read(mine.table_at, 64)];
    // Chains run while the key is revoked.
    let mut after = 0;
    for round in 0..3000 {
        if round % 100 == 0 {
            scene.other.keep_alive();
        }
        let reply = scene.session.round_trip(CHAIN, (round % 8) as u8 + 1, &chain(mine.key, &ops));
        assert!(!contains_secret(&reply));
        let status = ChainReply::of(&reply, 3).statuses()[0];
        statuses[usize::from(status)] += 1;
        assert!([OK, ACCESS].contains(&status), "{status}");
        after += u32::from(status == ACCESS);
        if after > 200 {
            break;
        }
    }
    assert!(after > 200, "the key still opens: {statuses:?}");
    dropper.reply(1, drop_asked, PATIENCE);
    // Its memory goes to another tenant, who fills it with secrets.
    until("the store is dropped", || {
        scene.other.keep_alive();
        scene.session.keep_alive();
        !scene.target.node.run(["store", "list"]).done().text().contains("mine")
    });
    scene.other.create("next", 32 << 20);
    let next = scene.other.store("next");
    for _ in 0..40 {
        scene.session.keep_alive();
        let taken = scene.other.buffer(&next, &SECRET.repeat(2000));
        let reply = scene.other.chain(next.key, &[read(taken, 32_000)]);
        assert_eq!(reply.output(0), SECRET.repeat(2000));
    }
    for op in
        [read(buffer, 512), read(mine.table_at, 64), fetch_add(buffer, 1), allocate(list_for(64), &[1; 64])]
    {
        assert_eq!(scene.status_by(mine.key, op), ACCESS);
    }
    assert_eq!(scene.status_by((next.key.0, mine.key.1), read(buffer, 512)), ACCESS);
    scene.target.reaches("refused_total", refused + 200);
    drop(dropper);
    scene.assert_untouched();
}

fn a_full_store_is_reported_and_affects_no_other_store(carrier: &'static str) {
    let mut scene = Scene::new(carrier);
    let before = scene.target.count("not_ready_total");
    // Allocates until the store is full, and continues to request. Other stores are not affected.
    let mut taken = 0;
    let mut not_ready = 0;
    for round in 0..3000 {
        let reply = scene
            .session
            .chain(scene.store.key, &[allocate(list_for(32_000), &vec![3; 30_000]), read(SCRATCH, 8)]);
        match reply.statuses()[0] {
            OK => taken += 1,
            4 => not_ready += 1,
            status => panic!("{status}"),
        }
        if not_ready > 100 {
            break;
        }
        if round % 16 == 0 {
            scene.other.keep_alive(); // On a slow device, 100 rounds take longer than a session may be silent.
        }
        if round % 100 == 0 {
            scene.witness.assert_well();
        }
    }
    println!("{carrier}: {taken} buffers of 30 kB were allocated from 16 MiB");
    assert!(not_ready > 100 && taken < 16 << 20 >> 14, "{taken}");
    scene.target.reaches("not_ready_total", before + 100);
    // The end of the session frees all of them.
    let live = |scene: &Scene| scene.target.stat("default")["live_buffers"].as_u64().expect("a number");
    assert!(live(&scene) >= taken);
    scene.session = Session::open(scene.target.url(carrier));
    until("the attacker's buffers are free again", || {
        scene.other.keep_alive();
        scene.session.keep_alive();
        live(&scene) <= 1
    });
    scene.assert_untouched();
}
