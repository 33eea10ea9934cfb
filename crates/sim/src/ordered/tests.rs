//! The checker of ordered maps passes correct histories and finds wrong ones. It agrees with a search through all
//! orders, which shares no code with it.

use super::*;
use crate::random::Random;

const NEVER: u64 = u64::MAX;
/// Distance in time between the effects of two operations of a generated history.
const STEP: u64 = 1_000;

fn value(tag: u64) -> Value {
    Value { tag, len: 8 }
}

/// One operation: `(time of the call, time of the return, key, ask, outcome)`. All times of a history are different.
type Row = (u64, u64, u64, Ask, Outcome);

fn put(tag: u64, key: u64, from: u64, to: u64) -> Row {
    (from, to, key, Ask::Put(value(tag)), if to == NEVER { Outcome::Unknown } else { Outcome::Done })
}

fn add(tag: u64, key: u64, from: u64, to: u64, outcome: Outcome) -> Row {
    (from, to, key, Ask::PutIfAbsent(value(tag)), outcome)
}

fn get(tag: Option<u64>, key: u64, from: u64, to: u64) -> Row {
    let found = tag.map_or(Outcome::Absent, |tag| Outcome::Found(value(tag)));
    (from, to, key, Ask::Get, found)
}

fn delete(had: bool, key: u64, from: u64, to: u64) -> Row {
    (from, to, key, Ask::Delete, if had { Outcome::Done } else { Outcome::Absent })
}

/// A scan of keys 0 to 9 that has returned these items.
fn scan(limit: u32, items: &[(i64, u64)], from: u64, to: u64) -> Row {
    let item = |&(distance, tag): &(i64, u64)| Item { distance, value: value(tag) };
    let outcome = Outcome::Scanned(items.iter().map(item).collect());
    (from, to, 0, Ask::Scan { keys: 10, limit }, outcome)
}

fn history(rows: &[Row]) -> History {
    let mut events: Vec<(u64, usize, bool)> =
        rows.iter().enumerate().map(|(at, row)| (row.0, at, false)).collect();
    events
        .extend(rows.iter().enumerate().filter(|(_, row)| row.1 != NEVER).map(|(at, row)| (row.1, at, true)));
    events.sort_unstable();
    let mut history = History::new();
    let mut ids = vec![None; rows.len()];
    for (ns, at, is_return) in events {
        match ids[at] {
            Some(id) if is_return => history.returned(id, rows[at].4.clone(), ns),
            _ => ids[at] = Some(history.call(at as u32, rows[at].2, rows[at].3, ns)),
        }
    }
    history
}

/// Returns what the checker says about a history, after comparing its verdict with that of the search.
fn said(rows: &[Row]) -> Option<String> {
    let checked = Maps(Limits::default()).check(&history(rows));
    assert_eq!(checked.undecided, Vec::<String>::new());
    assert_eq!(checked.violated.is_empty(), checked.window.is_none(), "{rows:#?}");
    assert_eq!(checked.violated.is_empty(), brute::is_right(rows), "the checkers differ: {rows:#?}");
    checked.violated.first().cloned()
}

#[test]
fn a_history_without_a_wrong_outcome_is_good() {
    let rows = [
        put(1, 3, 10, 20),
        add(2, 3, 30, 40, Outcome::Present),
        add(3, 5, 50, 60, Outcome::Done),
        scan(9, &[(3, 1), (5, 3)], 70, 80),
        delete(true, 3, 90, 100),
        delete(false, 3, 110, 120),
        scan(9, &[(5, 3)], 130, 140),
        get(None, 3, 150, 160),
    ];
    assert_eq!(said(&rows), None);
}

#[test]
fn a_stale_get_is_found() {
    let rows = [put(1, 3, 10, 20), put(2, 3, 30, 40), get(Some(1), 3, 50, 60)];
    assert_eq!(said(&rows).as_deref(), Some("key 3 is not linearizable"));
}

#[test]
fn a_lost_update_is_found() {
    assert!(said(&[put(1, 3, 10, 20), get(None, 3, 30, 40)]).is_some());
    assert!(said(&[put(1, 3, 10, 20), add(2, 3, 30, 40, Outcome::Done)]).is_some());
    assert!(said(&[add(1, 3, 10, 40, Outcome::Done), add(2, 3, 20, 30, Outcome::Done)]).is_some());
}

#[test]
fn a_resurrection_is_found() {
    let rows = [put(1, 3, 10, 20), delete(true, 3, 30, 40)];
    assert!(said(&[&rows[..], &[get(Some(1), 3, 50, 60)]].concat()).is_some());
    assert!(said(&[&rows[..], &[scan(9, &[(3, 1)], 50, 60)]].concat()).is_some());
    assert!(said(&[&rows[..], &[scan(9, &[], 50, 60)]].concat()).is_none());
}

#[test]
fn a_phantom_item_is_found() {
    let rows = [put(1, 3, 10, 20), scan(9, &[(3, 1), (4, 2)], 30, 40)];
    assert_eq!(said(&rows).as_deref(), Some("key 4 is not linearizable"));
    assert!(said(&[put(1, 3, 50, 60), scan(9, &[(3, 1)], 30, 40)]).is_some(), "an item before its put");
}

#[test]
fn an_old_item_is_found() {
    let rows = [put(1, 3, 10, 20), put(2, 3, 30, 40)];
    assert!(said(&[&rows[..], &[scan(9, &[(3, 1)], 50, 60)]].concat()).is_some());
    assert!(said(&[&rows[..], &[scan(9, &[(3, 1)], 15, 60)]].concat()).is_none());
}

#[test]
fn a_missing_item_is_found() {
    let rows = [put(1, 3, 10, 20), put(2, 5, 30, 40), scan(9, &[(5, 2)], 50, 60)];
    assert_eq!(said(&rows).as_deref(), Some("key 3 is not linearizable"));
    let rows = [put(1, 3, 10, 20), put(2, 5, 30, 40), scan(9, &[(3, 1)], 50, 60)];
    assert!(said(&rows).is_some(), "the last item is missing, and the limit is not reached");
    let rows = [put(1, 3, 10, 20), put(2, 5, 30, 40), scan(1, &[(3, 1)], 50, 60)];
    assert!(said(&rows).is_none(), "the limit is reached");
    let rows = [put(1, 3, 10, 20), put(2, 5, 30, 40), scan(1, &[(5, 2)], 50, 60)];
    assert!(said(&rows).is_some(), "a limited scan has skipped a key");
}

#[test]
fn items_in_a_wrong_order_are_found() {
    let rows = [put(1, 3, 10, 20), put(2, 5, 30, 40)];
    let said = |limit, items: &[(i64, u64)]| {
        said(&[&rows[..], &[scan(limit, items, 50, 60)]].concat())
            .map(|said| said.replace("scan of client 2 ", ""))
    };
    let text = |what: &str| Some(format!("a from key 0 returned {what}"));
    assert_eq!(said(9, &[(5, 2), (3, 1)]), text("keys that do not ascend"));
    assert_eq!(said(9, &[(3, 1), (3, 1), (5, 2)]), text("a key twice"));
    assert_eq!(said(9, &[(3, 1), (5, 2), (3, 1)]), text("a key twice"));
    assert_eq!(said(1, &[(3, 1), (5, 2)]), text("more items than its limit"));
    assert_eq!(said(9, &[(-1, 1), (3, 1), (5, 2)]), text("a key outside its range"));
    assert_eq!(said(9, &[(3, 1), (5, 2), (10, 3)]), text("a key outside its range"));
}

#[test]
fn a_scan_is_no_snapshot() {
    let puts = [put(1, 3, 10, 20), put(2, 5, 30, 40)];
    for items in [&[][..], &[(3, 1)], &[(5, 2)], &[(3, 1), (5, 2)]] {
        assert_eq!(said(&[&puts[..], &[scan(9, items, 5, 50)]].concat()), None, "{items:?}");
    }
}

#[test]
fn scans_that_go_back_are_found() {
    let slow = put(1, 3, 10, 100);
    assert!(said(&[slow.clone(), scan(9, &[], 20, 30), scan(9, &[(3, 1)], 40, 50)]).is_none());
    assert!(said(&[slow.clone(), scan(9, &[(3, 1)], 20, 30), scan(9, &[], 40, 50)]).is_some());
    assert!(said(&[slow.clone(), get(Some(1), 3, 20, 30), scan(9, &[], 40, 50)]).is_some());
    assert!(said(&[slow, scan(9, &[(3, 1)], 20, 30), get(None, 3, 40, 50)]).is_some());
}

#[test]
fn an_operation_of_unknown_fate_may_have_happened_or_not() {
    let lost = put(1, 3, 10, NEVER);
    assert_eq!(said(&[lost.clone(), scan(9, &[], 20, 30), scan(9, &[(3, 1)], 40, 50)]), None);
    assert!(said(&[lost.clone(), scan(9, &[(3, 1)], 20, 30), scan(9, &[], 40, 50)]).is_some());
    let ended = (10, 15, 3, Ask::Put(value(1)), Outcome::Unknown);
    assert!(said(&[ended, scan(9, &[], 20, 30), scan(9, &[(3, 1)], 40, 50)]).is_some(), "it has ended");
    let failed = (10, 15, 3, Ask::Put(value(1)), Outcome::Failed);
    assert!(said(&[failed, scan(9, &[(3, 1)], 40, 50)]).is_some());
    let deleted = (30, NEVER, 3, Ask::Delete, Outcome::Unknown);
    for items in [&[][..], &[(3, 1)]] {
        assert_eq!(said(&[put(1, 3, 10, 20), deleted.clone(), scan(9, items, 40, 50)]), None);
    }
}

/// Returns the operations of a correct history on these keys. Each takes effect at one instant between its call and
/// its return, and each lookup of a scan at an instant of its own. If `overlap`, operations overlap, and some get an
/// unknown fate. No value is put twice.
fn right(random: &Random, keys: u64, operations: u64, overlap: u64) -> Vec<Row> {
    assert!(operations < STEP / 2);
    let mut map: BTreeMap<u64, Value> = BTreeMap::new();
    let mut changes: Vec<(u64, u64, Option<Value>)> = Vec::new();
    let mut rows: Vec<Row> = Vec::new();
    for at in 0..operations {
        let effect = (at + 10) * STEP;
        let from = effect - random.below(overlap) * STEP - at - 1;
        let to = effect + random.below(overlap) * STEP + at + 1;
        let (key, new) = (random.below(keys), value(at + 1));
        let had = map.get(&key).copied();
        let (ask, outcome) = match random.below(8) {
            0 => (Ask::Get, had.map_or(Outcome::Absent, Outcome::Found)),
            1 | 2 => (Ask::Put(new), Outcome::Done),
            3 => (Ask::PutIfAbsent(new), if had.is_some() { Outcome::Present } else { Outcome::Done }),
            4 => (Ask::Delete, if had.is_some() { Outcome::Done } else { Outcome::Absent }),
            5 if overlap > 1 => (Ask::Put(new), Outcome::Unknown),
            _ => (
                Ask::Scan { keys: keys - key, limit: random.between(1, keys + 1) as u32 },
                Outcome::Scanned(Vec::new()),
            ),
        };
        match (ask, &outcome) {
            (Ask::Put(new) | Ask::PutIfAbsent(new), Outcome::Done) => drop(map.insert(key, new)),
            (Ask::Delete, Outcome::Done) => drop(map.remove(&key)),
            _ => {}
        }
        if outcome == Outcome::Done {
            changes.push((effect, key, map.get(&key).copied()));
        }
        let is_forgotten = overlap > 1 && random.one_in(8) || outcome == Outcome::Unknown;
        match is_forgotten {
            true => rows.push((from, if random.one_in(2) { NEVER } else { to }, key, ask, Outcome::Unknown)),
            false => rows.push((from, to, key, ask, outcome)),
        }
    }
    for (from, to, first, ask, outcome) in &mut rows {
        let (Ask::Scan { keys, limit }, Outcome::Scanned(items)) = (*ask, outcome) else { continue };
        let lookup = |distance: u64| {
            let instant = random.between(*from, *to);
            let is_before = |change: &&(u64, u64, _)| change.0 < instant && change.1 == *first + distance;
            let (.., now) = changes.iter().rev().find(is_before)?;
            now.map(|value| Item { distance: distance as i64, value })
        };
        *items = (0..keys).filter_map(lookup).take(limit as usize).collect();
    }
    rows
}

#[test]
fn correct_histories_are_good() {
    let random = Random::new(1);
    for round in 0..1_000 {
        let rows = right(&random, 1 + round % 12, 60, 1 + round % 5);
        let checked = Maps(Limits::default()).check(&history(&rows));
        assert_eq!(checked, Checked::default(), "round {round}: {rows:#?}");
    }
}

/// Wrong outcomes that [`spoil`] can give.
const KINDS: [&str; 9] =
    ["stale get", "lost update", "resurrection", "phantom", "old item", "missing", "twice", "order", "limit"];

/// Makes one outcome of a correct history without overlaps wrong. Returns false if the history has no such outcome.
fn spoil(rows: &mut [Row], kind: &str, random: &Random) -> bool {
    let before = |rows: &[Row], at: usize, key: u64, deleted: bool| {
        let own: Vec<&Row> = rows[..at].iter().filter(|row| row.2 == key && row.4 == Outcome::Done).collect();
        let put = |row: &&Row| match row.3 {
            Ask::Put(value) | Ask::PutIfAbsent(value) => Some(value),
            _ => None,
        };
        let is_deleted = own.last().is_some_and(|row| row.3 == Ask::Delete);
        let values: Vec<Value> = own.iter().filter_map(put).collect();
        let current = if is_deleted { 0 } else { 1 };
        let old = values.iter().rev().nth(current).copied();
        old.filter(|_| is_deleted == deleted)
    };
    let start = random.below(rows.len() as u64) as usize;
    for at in (start..rows.len()).chain(0..start) {
        let (key, ask) = (rows[at].2, rows[at].3);
        let (old, dead) = (before(rows, at, key, false), before(rows, at, key, true));
        let spoilt = match (kind, ask, rows[at].4.clone()) {
            ("stale get", Ask::Get, Outcome::Found(_)) => old.map(Outcome::Found),
            ("lost update", Ask::Get, Outcome::Found(_)) => Some(Outcome::Absent),
            ("lost update", Ask::PutIfAbsent(_), Outcome::Present) => Some(Outcome::Done),
            ("resurrection", Ask::Get, Outcome::Absent) => dead.map(Outcome::Found),
            (_, Ask::Scan { keys, limit }, Outcome::Scanned(mut items)) => {
                let place = random.below(items.len() as u64) as usize;
                let free =
                    (0..keys as i64).find(|distance| items.iter().all(|item| item.distance != *distance));
                let is_full = items.len() >= limit as usize;
                let was = items.clone();
                match kind {
                    "phantom" => {
                        if let Some(distance) = free.filter(|_| !is_full) {
                            items.push(Item { distance, value: value(1 << 40) });
                            items.sort_by_key(|item| item.distance);
                        }
                    }
                    "old item" if !items.is_empty() => {
                        let old = before(rows, at, key + items[place].distance as u64, false);
                        old.into_iter().for_each(|old| items[place].value = old);
                    }
                    "missing" if !items.is_empty() => drop(items.remove(place)),
                    "twice" if !items.is_empty() => items.insert(place, items[place]),
                    "order" if items.len() > 1 => items.swap(0, 1),
                    "limit" => items.resize(limit as usize + 1, Item { distance: 0, value: value(1) }),
                    _ => {}
                }
                (items != was).then_some(Outcome::Scanned(items))
            }
            _ => None,
        };
        if let Some(spoilt) = spoilt {
            rows[at].4 = spoilt;
            return true;
        }
    }
    false
}

#[test]
fn each_kind_of_wrong_outcome_is_found() {
    let random = Random::new(2);
    for kind in KINDS {
        let mut spoilt = 0;
        for round in 0..300 {
            let mut rows = right(&random, 2 + round % 6, 60, 1);
            if spoil(&mut rows, kind, &random) {
                spoilt += 1;
                let checked = Maps(Limits::default()).check(&history(&rows));
                assert!(!checked.violated.is_empty(), "{kind}, round {round}: {rows:#?}");
                let window = checked.window.expect("a violation has a window");
                assert!(window.operations.len() <= 12, "{kind}: {:#?}", window.operations);
            }
        }
        assert!(spoilt > 100, "{kind}: only {spoilt} histories");
    }
}

#[test]
fn the_checker_agrees_with_a_search_through_all_orders() {
    let random = Random::new(3);
    let (mut good, mut bad) = (0, 0);
    for round in 0..4_000 {
        let mut rows = right(&random, 2 + round % 2, 9, 1 + round % 6);
        if round % 4 > 0 {
            spoil(&mut rows, KINDS[random.below(KINDS.len() as u64) as usize], &random);
        }
        match said(&rows) {
            None => good += 1,
            Some(_) => bad += 1,
        }
    }
    assert!(good > 1_000 && bad > 1_000, "{good} good, {bad} bad");
}

#[test]
fn scans_without_changes_take_no_search() {
    let mut rows = vec![put(1, 3, 10, 20), put(2, 5, 30, 40)];
    rows.extend((0..20_000).map(|at| scan(9, &[(3, 1), (5, 2)], 100 + 10 * at, 105 + 10 * at)));
    rows.push(delete(true, 3, 1_000_000, 1_000_010));
    rows.push(scan(9, &[(5, 2)], 1_000_020, 1_000_030));
    let history = history(&rows);
    let kept: Vec<usize> = by_key(&history).values().map(Vec::len).collect();
    assert_eq!(kept, [4, 2], "the changes of each key, and a lookup between each two of them");
    assert_eq!(Maps(Limits::default()).check(&history), Checked::default());
    // One more operation shows that what was dropped is still judged.
    rows.push(scan(9, &[(3, 1), (5, 2)], 1_000_040, 1_000_050));
    assert!(!Maps(Limits::default()).check(&self::history(&rows)).violated.is_empty());
}

/// A search through all orders of the operations on each key.
mod brute {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Step {
        from: u64,
        to: u64,
        ask: Ask,
        /// What a read or a conditional put has seen, if its outcome is known.
        saw: Option<Option<Value>>,
        /// Whether the step may also never happen.
        is_unknown: bool,
        /// Whether a conditional put or a delete reports that the key had a value.
        had: Option<bool>,
    }

    pub(super) fn is_right(rows: &[Row]) -> bool {
        let keys: BTreeSet<u64> = rows.iter().map(|row| row.2).chain(0..16).collect();
        rows.iter().all(ascends) && keys.into_iter().all(|key| is_explained(None, &steps(rows, key)))
    }

    fn ascends((.., ask, outcome): &Row) -> bool {
        let (Ask::Scan { keys, limit }, Outcome::Scanned(items)) = (ask, outcome) else { return true };
        let mut next = 0;
        for item in items {
            if item.distance < next || item.distance >= *keys as i64 {
                return false;
            }
            next = item.distance + 1;
        }
        items.len() <= *limit as usize
    }

    fn steps(rows: &[Row], key: u64) -> Vec<Step> {
        let step = |row: &Row| {
            let &(from, to, first, ask, ref outcome) = row;
            let mut step = Step { from, to, ask, saw: None, is_unknown: false, had: None };
            match (ask, outcome) {
                (Ask::Scan { keys, limit }, Outcome::Scanned(items)) => {
                    let distance = key.checked_sub(first).filter(|distance| *distance < keys)? as i64;
                    let found = items.iter().find(|item| item.distance == distance);
                    let earlier = items.iter().filter(|item| item.distance < distance).count();
                    step.saw = match found {
                        Some(item) => Some(Some(item.value)),
                        None if earlier < limit as usize => Some(None),
                        None => return None,
                    };
                }
                _ if first != key => return None,
                (_, Outcome::Failed) | (Ask::Get | Ask::Scan { .. }, Outcome::Unknown) => return None,
                (_, Outcome::Unknown) => step.is_unknown = true,
                (_, Outcome::Found(value)) => step.saw = Some(Some(*value)),
                (Ask::Get, _) => step.saw = Some(None),
                (Ask::PutIfAbsent(_), outcome) => step.had = Some(*outcome == Outcome::Present),
                (Ask::Delete, outcome) => step.had = Some(*outcome == Outcome::Done),
                _ => {}
            }
            Some(step)
        };
        rows.iter().filter_map(step).collect()
    }

    /// Whether some order of the steps, from this state of the key on, explains what they saw.
    fn is_explained(state: Option<Value>, left: &[Step]) -> bool {
        // A step that may never happen keeps no other one waiting.
        let first_end = left.iter().filter(|step| !step.is_unknown).map(|step| step.to).min();
        let Some(first_end) = first_end else { return true };
        left.iter().enumerate().filter(|(_, step)| step.from < first_end).any(|(at, step)| {
            let sees =
                step.saw.is_none_or(|saw| saw == state) && step.had.is_none_or(|had| had == state.is_some());
            let next = match step.ask {
                Ask::Put(value) => Some(value),
                Ask::PutIfAbsent(value) if state.is_none() => Some(value),
                Ask::Delete => None,
                _ => state,
            };
            // A step that may never happen does not happen once one has begun after its end.
            let is_left = |other: &&Step| !other.is_unknown || other.to > step.from;
            let others = left.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| other);
            let rest: Vec<Step> = others.filter(is_left).copied().collect();
            sees && is_explained(next, &rest)
        })
    }
}
