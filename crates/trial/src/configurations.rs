//! What the nodes hold of a store whose members are replaced: which of them serve its current
//! configuration, and which may lose their memory although the store must survive.
//!
//! The trial looks into the nodes. No client knows as much.
//!
//! Invariant: a node loses its memory only if of each list of members that is, or may become, the store's configuration
//! at most as many members are lost then as the store survives: f of 2f + 1 replicas.

use crate::{Scene, Site};
use farside_remote::control::{MemberState, Membership};
use farside_sim::world::{MILLIS, Nanos};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

/// Pause, in nanoseconds, after which the trial looks at the nodes again. It also looks when an operation begins or
/// ends, and after each request of a recoverer.
const LOOKS_AGAIN: Nanos = MILLIS;

/// The store's configurations, as the nodes know them.
pub(crate) struct Configurations {
    /// Number of members of each configuration.
    members: usize,
    /// Number of members of each configuration that may be lost.
    tolerated: usize,
    sites: RefCell<Vec<Held>>,
    /// The lists of members that were seen, with their configurations, by the incarnations of their nodes' memories. A
    /// list is first seen at its newcomer.
    lists: RefCell<BTreeSet<(u64, Vec<u64>)>>,
    /// The highest configuration that a majority of its members has served. From then on, at most f of them are lost,
    /// so it or a later one is always found, and former lists no longer matter.
    established: Cell<u64>,
}

/// What a node holds, or held before its process died.
#[derive(Clone, Debug, Default, PartialEq)]
struct Held {
    /// Incarnation of the node's memory; 0 while the memory is lost and there is no other one.
    incarnation: u64,
    membership: Option<Membership>,
    /// Whether the member serves the current configuration.
    serves: bool,
}

impl Held {
    /// The member's configuration, if the member serves it or has served it.
    fn configuration(&self) -> Option<u64> {
        let is_served = |of: &&Membership| matches!(of.state, MemberState::Committed | MemberState::Revoked);
        self.membership.as_ref().filter(is_served).map(|of| of.configuration)
    }
}

impl Configurations {
    pub(crate) fn new(members: u32, tolerated: usize, sites: usize) -> Configurations {
        Configurations {
            members: members as usize,
            tolerated,
            sites: RefCell::new(vec![Held::default(); sites]),
            lists: RefCell::default(),
            established: Cell::new(0),
        }
    }

    /// Number of members that are a majority.
    pub(crate) fn majority(&self) -> usize {
        self.members / 2 + 1
    }

    /// Looks at all nodes. If a node holds another member than before, or serves no longer, or again, its site has had
    /// an outage until now.
    pub(crate) fn look(&self, scene: &Scene) {
        let mut sites = self.sites.borrow_mut();
        let before = sites.clone();
        for (held, site) in sites.iter_mut().zip(&scene.sites).filter(|(_, site)| site.node.is_served()) {
            held.incarnation = site.node.incarnation();
            held.membership = site.node.membership(&site.store_name());
        }
        let current = sites.iter().filter_map(Held::configuration).max();
        for held in &mut *sites {
            held.serves = held
                .membership
                .as_ref()
                .is_some_and(|of| of.state == MemberState::Committed && Some(of.configuration) == current);
        }
        self.note_lists(&sites);
        for (index, (now, before)) in sites.iter().zip(&before).enumerate() {
            if now != before {
                scene.outages.note(None, Some(index), scene.world.now());
            }
        }
    }

    fn note_lists(&self, sites: &[Held]) {
        let mut lists = self.lists.borrow_mut();
        for of in sites.iter().filter_map(|held| held.membership.as_ref()) {
            if of.configuration >= self.established.get() {
                let incarnations = of.members.iter().map(|member| member.incarnation);
                lists.insert((of.configuration, incarnations.collect()));
            }
        }
        let served = |configuration: u64| {
            sites.iter().filter(|held| held.configuration() == Some(configuration)).count()
        };
        for configuration in sites.iter().filter_map(Held::configuration) {
            // A majority of the members of k has served k before any member serves k + 1.
            let is_established = served(configuration) >= self.majority();
            let established = if is_established { configuration } else { configuration.saturating_sub(1) };
            self.established.set(self.established.get().max(established));
        }
        lists.retain(|(configuration, _)| *configuration >= self.established.get());
    }

    /// Whether a site's node serves the current configuration, as of the last look.
    pub(crate) fn serves(&self, site: &Site) -> bool {
        site.node.is_served() && self.sites.borrow()[site.index].serves
    }

    /// Whether a site's node holds a member of the store, as of the last look.
    pub(crate) fn holds(&self, site: &Site) -> bool {
        self.sites.borrow()[site.index].membership.is_some()
    }

    /// Whether the site's node has lost its memory, and was not seen with another one yet.
    pub(crate) fn has_lost(&self, site: &Site) -> bool {
        self.sites.borrow()[site.index].incarnation == 0
    }

    /// Whether the site's node may lose its memory.
    pub(crate) fn may_lose(&self, scene: &Scene, site: &Site) -> bool {
        self.look(scene);
        let sites = self.sites.borrow();
        // What a node that is down holds may be newer than what was seen.
        let is_known = |other: &Rc<Site>| other.node.is_served() || sites[other.index].incarnation == 0;
        let lives = |incarnation: &u64| {
            sites
                .iter()
                .enumerate()
                .any(|(index, held)| index != site.index && held.incarnation == *incarnation)
        };
        let tolerates = |(_, list): &(u64, Vec<u64>)| {
            list.iter().filter(|incarnation| !lives(incarnation)).count() <= self.tolerated
        };
        scene.sites.iter().all(is_known) && self.lists.borrow().iter().all(tolerates)
    }

    /// Notes that the site's node has lost its memory. The node's process has been killed.
    pub(crate) fn lose(&self, site: &Site) {
        self.sites.borrow_mut()[site.index] = Held::default();
    }

    /// Whether a recoverer has something to do, as of the last look.
    pub(crate) fn is_unsettled(&self) -> bool {
        let sites = self.sites.borrow();
        let serving = sites.iter().filter(|held| held.serves).count();
        serving < self.members || sites.iter().any(|held| held.membership.is_some() && !held.serves)
    }

    /// Returns the first node at which no member of the current configuration is, or was before its node lost its
    /// memory.
    pub(crate) fn spare(&self) -> Option<u32> {
        let sites = self.sites.borrow();
        let current = sites.iter().filter(|held| held.configuration().is_some());
        let current = current.max_by_key(|held| held.configuration())?.membership.as_ref()?;
        (0..sites.len() as u32).find(|node| current.members.iter().all(|member| member.node != *node))
    }

    /// Number of configurations after the first that a majority of their members has served.
    pub(crate) fn replacements(&self) -> u64 {
        self.established.get().saturating_sub(1)
    }

    /// Describes what each node holds, for reports.
    pub(crate) fn describe(&self) -> String {
        let sites = self.sites.borrow();
        let held = sites.iter().map(|held| match &held.membership {
            Some(of) => format!("{:?} of {}", of.state, of.configuration),
            None => "none".to_owned(),
        });
        held.collect::<Vec<_>>().join(", ")
    }
}

/// Looks at the nodes again and again.
pub(crate) fn watch(scene: &Rc<Scene>) {
    scene.configurations.look(scene);
    let theirs = Rc::clone(scene);
    scene.world.at(scene.world.now() + LOOKS_AGAIN, move || watch(&theirs));
}
