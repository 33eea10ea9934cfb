//! The times at which clients could not reach nodes, and the judgement of operations by these times.
//!
//! Faults of single messages are no outages: a session repeats its requests, and a lost session is opened again soon.
//!
//! Invariant: an outage is noted when it begins. Its end is known then, except for that of a node that is down.

use crate::Scene;
use farside_remote::clock::Clock;
use farside_remote::fabric::DEADLINE;
use farside_sim::world::{MILLIS, Nanos, SECONDS};
use std::cell::RefCell;
use std::time::Duration;

/// Time, in nanoseconds, for which an operation may last after a majority of the nodes can be reached again. Within it,
/// sessions end by silence, the next ones are opened, and a client that pauses between its attempts tries again.
const LASTS_MAX: Nanos = SECONDS;
/// Shortest time, in nanoseconds, after which a client with a fast clock gives up a node. An operation without a
/// majority for longer may have given up nodes one after the other. It ends when the last request has timed out.
const PATIENCE_MIN: Nanos = 700 * MILLIS;
const GIVES_UP_WITHIN: Nanos = 3 * SECONDS;
/// Longest time, in nanoseconds, for which an operation that may wait for others lasts after the last outage.
const ENDS_WITHIN: Nanos = 3 * SECONDS;

/// The outages between each client and each node.
pub(crate) struct Outages(RefCell<Vec<Vec<Outage>>>);

/// Outages between a client and a node.
#[derive(Clone, Copy, Default)]
struct Outage {
    /// Number of outages so far.
    count: u64,
    /// Time until which the latest of them lasts, except for a node that is down.
    until: Nanos,
}

/// An operation, and the outages before it.
pub(crate) struct Watch {
    client: u32,
    began: Nanos,
    /// When the operation began, by the clock of the client's process.
    began_by_clock: Option<Duration>,
    /// For each site whether the client could reach its node at the beginning, and the number of outages before.
    sites: Vec<(bool, u64)>,
    /// Number of the outages of all clients before.
    of_all: u64,
    /// Whether all clients could reach all nodes at the beginning, except those that have lost their memory.
    was_calm: bool,
}

impl Outages {
    /// Creates the list without outages.
    pub(crate) fn new(clients: u32, sites: u32) -> Outages {
        Outages(RefCell::new(vec![vec![Outage::default(); sites as usize]; clients as usize]))
    }

    /// Notes an outage that lasts until this time, between one client or all, and one site or all.
    pub(crate) fn note(&self, client: Option<u32>, site: Option<usize>, until: Nanos) {
        let is_struck = |whom: Option<usize>, index| whom.is_none_or(|whom| whom == index);
        for (index, sites) in self.0.borrow_mut().iter_mut().enumerate() {
            if !is_struck(client.map(|client| client as usize), index) {
                continue;
            }
            for (_, outage) in sites.iter_mut().enumerate().filter(|(index, _)| is_struck(site, *index)) {
                *outage = Outage { count: outage.count + 1, until: until.max(outage.until) };
            }
        }
    }

    /// Time at which the last of the outages so far ends, except for those of nodes that are down.
    pub(crate) fn last_end(&self) -> Nanos {
        self.0.borrow().iter().flatten().map(|outage| outage.until).max().unwrap_or(0)
    }

    /// Whether an outage lasts, or a node is down.
    pub(crate) fn are_going_on(&self, scene: &Scene) -> bool {
        self.last_end() > scene.world.now() || !is_served(scene)
    }

    /// Begins to watch an operation of a client.
    pub(crate) fn begin(&self, scene: &Scene, client: u32) -> Watch {
        scene.configurations.look(scene);
        let (all, began) = (self.0.borrow(), scene.world.now());
        let outages = all.get(client as usize).into_iter().flatten();
        let sites = outages.zip(&scene.sites).map(|(outage, site)| {
            let is_reached = scene.configurations.serves(site) && outage.until <= began;
            (is_reached, outage.count)
        });
        let sites = sites.collect();
        let was_calm = is_served(scene) && all.iter().flatten().all(|outage| outage.until <= began);
        let began_by_clock = clock_of(scene, client);
        Watch { client, began, began_by_clock, sites, of_all: count(&all), was_calm }
    }
}

/// Time by the clock of a client's process.
fn clock_of(scene: &Scene, client: u32) -> Option<Duration> {
    scene.clocks.borrow().get(client as usize)?.as_ref().map(Clock::now)
}

fn count(all: &[Vec<Outage>]) -> u64 {
    all.iter().flatten().map(|outage| outage.count).sum()
}

/// Whether all nodes are served, except those that have lost their memory.
fn is_served(scene: &Scene) -> bool {
    scene.sites.iter().all(|site| site.node.is_served() || scene.configurations.has_lost(site))
}

impl Watch {
    /// Judges an operation as [`Watch::judge`] does, if it may have waited for any other client.
    ///
    /// # Errors
    /// The operation failed although there was no outage, or before its time was over, or it lasted for too long after
    /// the last outage.
    pub(crate) fn judge_by_all(&self, scene: &Scene, error: Option<&str>) -> Result<(), String> {
        let all = scene.outages.0.borrow();
        if self.client as usize >= all.len() {
            return Ok(());
        }
        if let Some(error) = error
            && self.was_calm
            && count(&all) == self.of_all
        {
            return Err(format!("failed, although there was no outage: {error}"));
        }
        self.check_patience(scene, error)?;
        let last = all.iter().flatten().map(|outage| outage.until).max().unwrap_or(0);
        let lasted = scene.world.now().saturating_sub(last.max(self.began));
        if is_served(scene) && lasted > ENDS_WITHIN {
            return Err(format!("lasted for {lasted} ns after the last outage"));
        }
        Ok(())
    }

    /// Judges an operation that has ended with this error, or without one.
    ///
    /// # Errors
    /// The operation failed although a majority of the nodes could be reached all the time, or before its time was
    /// over, or it lasted for too long after a majority could be reached.
    pub(crate) fn judge(&self, scene: &Scene, error: Option<&str>) -> Result<(), String> {
        scene.configurations.look(scene);
        let (all, now) = (scene.outages.0.borrow(), scene.world.now());
        let Some(outages) = all.get(self.client as usize) else { return Ok(()) };
        let majority = scene.configurations.majority();
        let is_there = |site: usize| scene.configurations.serves(&scene.sites[site]);
        let undisturbed = self.sites.iter().enumerate().filter(|(site, (was_reached, count))| {
            *was_reached && is_there(*site) && outages[*site].count == *count
        });
        if let Some(error) = error
            && undisturbed.count() >= majority
        {
            return Err(format!(
                "failed, although a majority of the nodes was reached all the time: {error}"
            ));
        }
        self.check_patience(scene, error)?;
        let since = |(site, outage): (usize, &Outage)| match is_there(site) {
            true => outage.until.max(self.began),
            false => Nanos::MAX,
        };
        let mut reached: Vec<Nanos> = outages.iter().enumerate().map(since).collect();
        reached.sort_unstable();
        let since = reached[majority - 1];
        let (missed, lasted) = (since.saturating_sub(self.began), now.saturating_sub(since));
        if lasted > if missed < PATIENCE_MIN { LASTS_MAX } else { GIVES_UP_WITHIN } {
            return Err(format!(
                "lasted for {lasted} ns after a majority of the nodes was reached, for which it had waited {missed} ns"
            ));
        }
        Ok(())
    }

    /// Checks that an operation with this error has waited for as long as its client must try to reach a replica. No
    /// trial gives it a reason to fail sooner: at most f of 2f + 1 members lose their memory, so the others may answer
    /// later. The client measures the time by the clock of its process, which may run fast and jump.
    fn check_patience(&self, scene: &Scene, error: Option<&str>) -> Result<(), String> {
        let (Some(error), Some(began)) = (error, self.began_by_clock) else { return Ok(()) };
        let waited = clock_of(scene, self.client).map_or(DEADLINE, |now| now.saturating_sub(began));
        match waited < DEADLINE {
            true => {
                Err(format!("failed after {waited:?}, before its time of {DEADLINE:?} was over: {error}"))
            }
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_strikes_one_pair_or_all() {
        let outages = Outages::new(2, 3);
        outages.note(Some(1), Some(2), 50);
        outages.note(None, Some(0), 10);
        outages.note(Some(0), None, 20);
        let seen: Vec<Vec<(u64, Nanos)>> = (outages.0.borrow().iter())
            .map(|sites| sites.iter().map(|outage| (outage.count, outage.until)).collect())
            .collect();
        assert_eq!(seen, [[(2, 20), (1, 20), (1, 20)], [(1, 10), (0, 0), (1, 50)]]);
    }
}
