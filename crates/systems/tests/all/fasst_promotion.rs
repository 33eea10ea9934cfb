//! Tests of FaSST's promotions: members that lose their memory, at rest, within a commit and within a promotion;
//! promoters that die or meet; and coordinators of a former configuration.

use crate::fasst::{BACKUP, COMMIT, Client, LOG, STORE, VALIDATE, check, create_for, keys_of};
use crate::support::steered::{Nodes, Request, Steering, Then, on_nodes};
use farside_remote::fabric::Ran;
use farside_systems::heal::{Action, heal};
use farside_systems::rpc::fasst::FIRST_TYPE;
use farside_systems::store::{Loss, StoreError};
use farside_systems::txn::fasst::request;
use farside_systems::txn::{Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const FILL: Request = Request::Call(request::FILL);

/// Heals the store as another client. Returns the errors of what was left, and the repairs.
async fn healed(nodes: &Nodes, members: u32) -> (Vec<StoreError>, Vec<String>) {
    healed_by(&nodes.client().await, members).await
}

/// Does the same as this client.
async fn healed_by(fabric: &Steering, members: u32) -> (Vec<StoreError>, Vec<String>) {
    let entropy = u64::from(fabric.inner().process.0) << 20;
    let (mut left, mut done) = (Vec::new(), Vec::new());
    let tell = |told: farside_systems::heal::Healed| match told.action {
        Action::Left(error) => left.push(error),
        action => done.push(format!("{action:?}")),
    };
    let seen = heal(fabric, members, Some(STORE), Duration::ZERO, entropy, tell).await;
    if let Err(error) = seen {
        left.push(error);
    }
    (left, done)
}

/// Heals the store, and checks that nothing is left of a transaction.
///
/// # Errors
/// The store is not healed.
async fn whole(nodes: &Nodes, members: u32) -> Result<Client, String> {
    let (left, _) = healed(nodes, members).await;
    if !left.is_empty() {
        return Err(format!("not healed: {left:?}"));
    }
    let client = Client::open(nodes, members).await;
    check(client.txn.stat().await.map_err(|error| error.to_string())?)?;
    Ok(client)
}

/// Puts keys until each member has about this many, and deletes some of them. Returns what the store has.
async fn filled(client: &mut Client, members: u32, each: u32) -> BTreeMap<Vec<u8>, Option<Vec<u8>>> {
    let mut has = BTreeMap::new();
    for number in 0..members * each {
        let key = format!("key {number}").into_bytes();
        match client.put(&[(&key, &key)]).await {
            Ok(_) if number % 7 == 3 => {
                client.txn.begin();
                client.txn.delete(&key).expect("a short key");
                client.txn.commit().await.expect("nobody else is there");
                has.insert(key, None);
            }
            Ok(_) => drop(has.insert(key.clone(), Some(key))),
            Err(TxnError::TableFull) => {}
            Err(error) => panic!("{error}"),
        }
    }
    has
}

/// # Errors
/// A key has another value.
async fn compare(client: &mut Client, has: &BTreeMap<Vec<u8>, Option<Vec<u8>>>) -> Result<(), String> {
    for (key, value) in has {
        let found = client.get(key).await;
        if found.as_ref() != Ok(value) {
            return Err(format!("{} has {found:?}", String::from_utf8_lossy(key)));
        }
    }
    Ok(())
}

/// Loses members of a store, and promotes their backups. Then fills the store up.
///
/// # Errors
/// The store lacks something.
fn returns_from(members: u32, backups: u8, lost: &'static [u32]) -> Result<(), String> {
    on_nodes(members, async move |nodes| {
        // Each member has one bucket and 3 extra buckets, with 7 slots each.
        create_for(&nodes, members, backups, 1, 4).await;
        Client::open(&nodes, members).await.close().await;
        let mut client = Client::open(&nodes, members).await;
        // The bucket is not enough for a member's keys, and extra buckets are left.
        let has = filled(&mut client, members, 10).await;
        client.close().await;
        for member in lost {
            nodes.lose(*member).await;
        }
        let mut client = whole(&nodes, members).await?;
        compare(&mut client, &has).await?;
        let more = filled(&mut client, members, 30).await;
        compare(&mut client, &more).await?;
        client.close().await;
        let stat = whole(&nodes, members).await?.txn.stat().await.map_err(|error| error.to_string())?;
        if stat.keys != more.len() as u64 || stat.keys < 20 * u64::from(members) {
            return Err(format!("the store has room for {} keys: {stat:?}", more.len()));
        }
        Ok(())
    })
}

/// Sizes of stores, with numbers of backups, and the members that are lost.
const LOSSES: [(u32, u8, &[u32]); 8] = [
    (3, 1, &[0]),
    (3, 1, &[1]),
    (3, 2, &[2]),
    (4, 1, &[3]),
    (5, 2, &[0, 1]),
    (5, 2, &[2, 4]),
    (5, 2, &[3]),
    (5, 3, &[4, 0]),
];

fn all_return() -> Result<(), String> {
    LOSSES.iter().try_for_each(|&(members, backups, lost)| {
        returns_from(members, backups, lost).map_err(|what| format!("{members} {backups} {lost:?}: {what}"))
    })
}

#[test]
fn lost_members_return_with_what_the_others_have() {
    assert_eq!(all_return(), Ok(()));
}

#[test]
fn a_store_that_has_lost_too_many_members_is_lost() {
    for (members, backups, lost) in [(3, 1, &[0, 1][..]), (3, 2, &[0, 1]), (3, 0, &[1]), (2, 1, &[0])] {
        on_nodes(members, async move |nodes| {
            create_for(&nodes, members, backups, 4, 40).await;
            let mut client = Client::open(&nodes, members).await;
            filled(&mut client, members, 4).await;
            client.close().await;
            for member in lost {
                nodes.lose(*member).await;
            }
            let (left, done) = healed(&nodes, members).await;
            let is_lost =
                |error: &StoreError| matches!(error, StoreError::MemoryLost { loss: Loss::Items, .. });
            assert!(!left.is_empty() && left.iter().all(is_lost), "{left:?} {done:?}");
            assert_eq!(done, Vec::<String>::new());
        });
    }
}

/// A client of a store of three keys, and a transaction that it carries out.
struct Scene {
    nodes: Rc<Nodes>,
    members: u32,
    keys: [Vec<u8>; 4],
    process: farside_sim::world::ProcessId,
    outcome: Rc<RefCell<Option<Result<(), TxnError>>>>,
    packets: Rc<Cell<u32>>,
    /// Node of the packet at which the client has stopped.
    stopped_at: Rc<Cell<u32>>,
}

/// Begins a transaction that reads three keys, writes two of them and deletes another one. Its client stops at one of
/// its packets.
async fn begun(nodes: &Rc<Nodes>, members: u32, backups: u8, (packet, then): (u32, Then)) -> Scene {
    create_for(nodes, members, backups, 4, 40).await;
    let mut client = Client::open(nodes, members).await;
    let mut keys: Vec<Vec<u8>> = (0..3).map(|member| keys_of(&client, member, 1).remove(0)).collect();
    keys.push(keys_of(&client, 0, 2).remove(1));
    let keys: [Vec<u8>; 4] = keys.try_into().expect("four keys");
    let writes = keys.each_ref().map(|key| (&key[..], &b"0"[..]));
    client.put(&writes).await.expect("nobody else is there");
    nodes.world.sleep(7_100_000).await;
    let packets = Rc::new(Cell::new(0));
    let (counted, stopped_at) = (Rc::clone(&packets), Rc::new(Cell::new(0)));
    let stopped = Rc::clone(&stopped_at);
    client.fabric.inner().before_each(move |node, _| {
        counted.set(counted.get() + 1);
        if counted.get() == packet {
            stopped.set(node.0);
        }
        std::future::ready(match counted.get().cmp(&packet) {
            std::cmp::Ordering::Less => Then::Runs,
            std::cmp::Ordering::Equal => then,
            std::cmp::Ordering::Greater => Then::Stops,
        })
    });
    let (process, outcome) = (client.fabric.inner().process, Rc::new(RefCell::new(None)));
    let (theirs, theirs_keys) = (Rc::clone(&outcome), keys.clone());
    nodes.world.spawn(process, async move {
        *theirs.borrow_mut() = Some(client.change(theirs_keys.each_ref().map(Vec::as_slice)).await);
        std::future::pending().await
    });
    // Shorter than a lease: the client must not lose it before it dies.
    nodes.world.sleep(400_000).await;
    Scene { nodes: Rc::clone(nodes), members, keys, process, outcome, packets, stopped_at }
}

impl Scene {
    /// Heals the store, and checks what others find.
    async fn judge(&self) -> Result<(), String> {
        let mut other = whole(&self.nodes, self.members).await?;
        let [x, y, z, v] = self.keys.each_ref().map(Vec::as_slice);
        let mut found = Vec::new();
        for key in [x, y, v] {
            found.push(other.get(key).await.map_err(|error| error.to_string())?);
        }
        let is_new = found == [Some(b"1".to_vec()), Some(b"1".to_vec()), None];
        let is_old = found == vec![Some(b"0".to_vec()); 3];
        let is_possible = match &*self.outcome.borrow() {
            Some(Ok(())) => is_new,
            Some(Err(error)) if error.ran() == Ran::No => is_old,
            _ => is_new || is_old,
        };
        if !is_possible {
            return Err(format!("{:?}, and others find {found:?}", self.outcome.borrow()));
        }
        other.update(&[x, y, z], &[x, y, z], b"2").await.map_err(|error| error.to_string())?;
        other.close().await;
        whole(&self.nodes, self.members).await.map(drop)
    }
}

/// Kills a client at each packet of a transaction, and then loses a member.
fn die_everywhere(members: u32, backups: u8, lost: u32) -> Result<u32, String> {
    let mut deaths = 0;
    for then in [Then::Stops, Then::RunsLast] {
        for packet in 1.. {
            let has_died = on_nodes(members, async move |nodes| {
                let scene = begun(&nodes, members, backups, (packet, then)).await;
                nodes.world.kill(scene.process);
                nodes.lose(lost).await;
                scene.judge().await.map(|()| scene.packets.get() >= packet)
            });
            let has_died = has_died.map_err(|what| format!("packet {packet}, {then:?}, {lost}: {what}"))?;
            if !has_died {
                break;
            }
            deaths += 1;
        }
    }
    Ok(deaths)
}

#[test]
fn a_client_and_a_member_may_die_at_any_packet() {
    for lost in 0..3 {
        let deaths = die_everywhere(3, 1, lost).unwrap_or_else(|what| panic!("{what}"));
        assert!(deaths >= 2 * 12, "{deaths} deaths");
    }
}

/// Packets of the transaction, at which its client stops: locks without a record, a record in one log, all records and
/// no value, values at a backup.
const STOPS: [(u32, Then); 4] =
    [(6, Then::Stops), (7, Then::RunsLast), (9, Then::Stops), (9, Then::RunsLast)];

/// Longest time, in nanoseconds, that the next promoter needs, and others to find and change what the store has then.
const TAKES_MAX: u64 = 300_000_000;

/// Loses a member, and kills the promoter after each time until it is done. Then loses another member, if one is given,
/// and has another promoter go on.
fn promoters_die(members: u32, backups: u8, lost: u32, also: Option<u32>) -> Result<u32, String> {
    let mut deaths = 0;
    for (number, stop) in STOPS.into_iter().enumerate() {
        let mut is_done = false;
        let mut after = 20_000 + 10_000 * number as u64;
        while !is_done {
            is_done = on_nodes(members, async move |nodes| {
                let scene = begun(&nodes, members, backups, stop).await;
                nodes.world.kill(scene.process);
                nodes.lose(lost).await;
                let (ended, theirs) = (Rc::new(Cell::new(false)), Rc::clone(&nodes));
                let process = nodes.world.start_process();
                let has_ended = Rc::clone(&ended);
                nodes.world.spawn(process, async move {
                    // The promoter's own process dies with this one, which polls it.
                    let _may_fail = healed(&theirs, members).await;
                    has_ended.set(true);
                });
                nodes.world.sleep(after).await;
                nodes.world.kill(process);
                if let Some(also) = also {
                    nodes.lose(also).await;
                }
                let since = nodes.world.now();
                scene.judge().await?;
                // A recoverer that follows a dead one has nothing to wait for.
                match nodes.world.now() - since {
                    took if took > TAKES_MAX => Err(format!("the next promoter needs {took} ns")),
                    _ => Ok(ended.get()),
                }
            })
            .map_err(|what| format!("{stop:?}, promoter dies after {after} ns, {also:?}: {what}"))?;
            deaths += 1;
            after += if after < 3_000_000 { 130_000 } else { after / 3 };
        }
    }
    Ok(deaths)
}

#[test]
fn promoters_that_die_anywhere_are_followed() {
    let deaths = promoters_die(3, 1, 1, None).unwrap_or_else(|what| panic!("{what}"));
    assert!(deaths > 20, "{deaths} deaths");
}

#[test]
fn another_member_may_be_lost_within_a_promotion() {
    for also in [1, 0, 2] {
        let deaths = promoters_die(5, 2, 1, Some(also)).unwrap_or_else(|what| panic!("{what}"));
        assert!(deaths > 20, "{deaths} deaths");
    }
}

#[test]
fn two_promoters_at_the_same_time_agree() {
    for (number, stop) in STOPS.into_iter().enumerate() {
        for later in (0..12).map(|step| 170_000 * step + 1_000 * number as u64) {
            on_nodes(3, async move |nodes| {
                let scene = begun(&nodes, 3, 1, stop).await;
                nodes.world.kill(scene.process);
                nodes.lose(2).await;
                let (ended, process) = (Rc::new(Cell::new(0)), nodes.world.start_process());
                for delay in [0, later] {
                    let (theirs, ended) = (Rc::clone(&nodes), Rc::clone(&ended));
                    nodes.world.spawn(process, async move {
                        theirs.world.sleep(delay).await;
                        let _may_be_too_late = healed(&theirs, 3).await;
                        ended.set(ended.get() + 1);
                    });
                }
                while ended.get() < 2 {
                    nodes.world.sleep(10_000).await;
                }
                scene.judge().await.unwrap_or_else(|what| panic!("{stop:?}, {later}: {what}"));
            });
        }
    }
}

/// Has a promoter copy the record of a transaction after the member that had it is lost, and another promoter has
/// settled the transaction without it.
///
/// # Errors
/// The transaction is half committed.
fn settled_beside_a_late_promoter() -> Result<(), String> {
    on_nodes(5, async |nodes| {
        let scene = begun(&nodes, 5, 2, (7, Then::RunsLast)).await;
        nodes.world.kill(scene.process);
        let holder = scene.stopped_at.get();
        nodes.lose(if holder == 4 { 3 } else { 4 }).await;
        // 1: the first promoter copies the record; 2: the second one has settled; 3: the first one's copies are stored.
        let (stage, mut processes) = (Rc::new(Cell::new(0)), Vec::new());
        let ended = Rc::new(Cell::new(false));
        for number in 0..2 {
            let fabric = nodes.client().await;
            fabric.inner().names_calls_by(FIRST_TYPE);
            let (theirs, world) = (Rc::clone(&stage), nodes.world.clone());
            fabric.inner().before_each(move |node, request| {
                let (stage, world) = (Rc::clone(&theirs), world.clone());
                let wait = match (number, request) {
                    (0, LOG) if node.0 != holder => Some((1, 2, Then::RunsLast)),
                    (1, FILL) => Some((2, 3, Then::Runs)),
                    _ => None,
                };
                async move {
                    let Some((from, to, then)) = wait else { return Then::Runs };
                    stage.set(stage.get().max(from));
                    while stage.get() < to {
                        world.sleep(1000).await;
                    }
                    then
                }
            });
            let (process, ended) = (fabric.inner().process, Rc::clone(&ended));
            nodes.world.spawn(process, async move {
                let _may_fail = healed_by(&fabric, 5).await;
                ended.set(true);
            });
            while stage.get() <= number {
                nodes.world.sleep(1000).await;
            }
            if number == 0 {
                nodes.world.sleep(100_000).await;
                nodes.lose(holder).await;
            }
            processes.push(process);
        }
        nodes.world.sleep(1_000_000).await;
        nodes.world.kill(processes[0]);
        stage.set(3);
        while !ended.get() {
            nodes.world.sleep(10_000).await;
        }
        scene.judge().await
    })
}

#[test]
fn a_promoter_changes_nothing_after_a_later_one_has_begun() {
    assert_eq!(settled_beside_a_late_promoter(), Ok(()));
}

/// Has a coordinator wait before its packets of a kind, while a member is lost that it does not need, and promoted.
/// Then lets it go on. Returns its outcome, and what others find.
fn outcome_of_a_late_coordinator(before: Request) -> (Result<(), TxnError>, Option<Vec<u8>>) {
    on_nodes(3, async move |nodes| {
        create_for(&nodes, 3, 1, 1, 40).await;
        let mut client = Client::open(&nodes, 3).await;
        // The logs of the only client are the first two members, and so are the copies of the key.
        let (x, y) = (keys_of(&client, 0, 1).remove(0), keys_of(&client, 1, 1).remove(0));
        client.put(&[(&x, b"0"), (&y, b"0")]).await.expect("nobody else is there");
        nodes.world.sleep(7_100_000).await;
        let (stage, world) = (Rc::new(Cell::new(0)), nodes.world.clone());
        let waiting = Rc::clone(&stage);
        client.fabric.inner().before_each(move |_, request| {
            let (stage, world) = (Rc::clone(&waiting), world.clone());
            async move {
                if request == before {
                    stage.set(stage.get().max(1));
                    while stage.get() < 2 {
                        world.sleep(1000).await;
                    }
                }
                Then::Runs
            }
        });
        let (process, outcome) = (client.fabric.inner().process, Rc::new(RefCell::new(None)));
        let (theirs, key, other) = (Rc::clone(&outcome), x.clone(), y.clone());
        nodes.world.spawn(process, async move {
            *theirs.borrow_mut() = Some(client.update(&[&key, &other], &[&key], b"1").await);
            std::future::pending().await
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        nodes.lose(2).await;
        let (left, _) = healed(&nodes, 3).await;
        assert_eq!(left, []);
        // The next holder of the only id has the epoch that the coordinator had.
        let mut next = Client::open(&nodes, 3).await;
        next.put(&[(&y, b"2")]).await.expect("nobody has a lock");
        stage.set(2);
        while outcome.borrow().is_none() {
            nodes.world.sleep(1000).await;
        }
        let found = next.get(&x).await.expect("nobody has a lock");
        let outcome = outcome.borrow_mut().take().expect("it has ended");
        (outcome, found)
    })
}

/// Whether late coordinators are told the truth.
fn late_coordinators_know() -> bool {
    [VALIDATE, LOG, BACKUP, COMMIT].into_iter().all(|before| {
        let (outcome, found) = outcome_of_a_late_coordinator(before);
        let is_committed = found == Some(b"1".to_vec());
        let is_late = [BACKUP, COMMIT].contains(&before);
        is_committed == is_late && (outcome.is_ok() == is_late)
    })
}

#[test]
fn a_late_coordinator_of_a_former_configuration_changes_nothing() {
    assert!(late_coordinators_know());
    let (outcome, _) = outcome_of_a_late_coordinator(LOG);
    let error = outcome.expect_err("its keys were revoked");
    assert_eq!(error.ran(), Ran::No, "{error}");
    assert!(matches!(error, TxnError::Store(StoreError::Replaced { .. })), "{error}");
}

#[cfg(farside_mutants)]
#[test]
fn these_tests_find_broken_variants() {
    use farside_remote::mutant::Mutant;
    use farside_systems::txn::fasst::mutants;
    let under = |mutant: Mutant, test: &dyn Fn() -> bool| {
        Mutant::switch(Some(mutant));
        let passes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or(false);
        Mutant::switch(None);
        assert!(!passes, "{mutant:?} lives");
    };
    under(mutants::EXTRA_UNCHAINED, &|| all_return().is_ok());
    under(mutants::EXTRA_TAKEN_TWICE, &|| all_return().is_ok());
    under(mutants::EPOCHS_KEPT, &|| all_return().is_ok());
    under(mutants::PROMOTERS_UNFENCED, &|| settled_beside_a_late_promoter().is_ok());
    under(mutants::FILLED_EARLY, &|| (0..3).all(|lost| die_everywhere(3, 1, lost).is_ok()));
    under(mutants::RECORD_IGNORED, &|| (0..3).all(|lost| die_everywhere(3, 1, lost).is_ok()));
}
