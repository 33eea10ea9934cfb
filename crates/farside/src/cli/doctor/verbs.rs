//! Checks of RDMA: the library, the devices, their ports and addresses, and the limit on locked memory.
//!
//! Invariant: [`listed`] reads files of the system only. [`checks`], which opens devices, runs only if the user has
//! named the fabric.

use super::check::Check;
use super::system::{Capability, has, limit};
use super::{fabrics, memory, names, text};
use crate::cli::human_bytes;
use farside_fabrics::verbs::device::{self, Atomics, Device, Unavailable};

/// A device, as the system lists it.
#[derive(Clone, Debug, PartialEq)]
struct Listed {
    name: String,
    /// For each port: the text of its state, and the name of its link layer.
    ports: Vec<(String, String)>,
}

/// Returns the devices that the system lists. Opens no device.
fn in_system() -> Vec<Listed> {
    let folder = "/sys/class/infiniband";
    let device = |name: String| {
        let at = format!("{folder}/{name}/ports");
        let of = |port: &String, file: &str| text(&format!("{at}/{port}/{file}")).unwrap_or_default();
        let ports = names(&at).unwrap_or_default();
        let ports = ports.iter().map(|port| (of(port, "state"), of(port, "link_layer"))).collect();
        Listed { name, ports }
    };
    names(folder).unwrap_or_default().into_iter().map(device).collect()
}

/// Reports the devices that the system lists.
pub(super) fn listed() -> Check {
    reported(&in_system())
}

fn reported(devices: &[Listed]) -> Check {
    match described(devices) {
        None => Check::note("fabric.verbs", "verbs", "the system lists no RDMA device (read from /sys only)"),
        Some(devices) => {
            Check::note("fabric.verbs", "verbs", format!("the system lists {devices} (read from /sys only)"))
                .remedy("farside doctor --fabric verbs   (opens the devices, and tries one)")
        }
    }
}

/// Describes devices, such as `mlx5_0 (ACTIVE InfiniBand, DOWN Ethernet)`; `None` if there are none.
fn described(devices: &[Listed]) -> Option<String> {
    let described = devices.iter().map(|device| {
        let ports = device.ports.iter().map(|(state, link)| {
            // The system writes a port's state as "4: ACTIVE".
            let state = state.rsplit(':').next().unwrap_or_default().trim();
            [state, link.trim()].iter().filter(|text| !text.is_empty()).copied().collect::<Vec<_>>().join(" ")
        });
        let ports: Vec<String> = ports.filter(|port| !port.is_empty()).collect();
        if ports.is_empty() { device.name.clone() } else { format!("{} ({})", device.name, ports.join(", ")) }
    });
    let described: Vec<String> = described.collect();
    (!described.is_empty()).then(|| described.join(", "))
}

/// Opens the devices, and tries the first that can send. Ends after the first check that fails.
pub(super) fn checks() -> Vec<Check> {
    let (mut checks, usable) = of_devices(device::devices(), &in_system());
    let Some(usable) = usable else { return checks };
    checks.push(locked(text("/proc/self/limits").as_deref(), text("/proc/self/status").as_deref()));
    checks.push(memory::huge_pages());
    checks.push(fabrics::try_verbs(&usable.name));
    checks
}

/// Judges the library and the devices. Also returns the device to try, if no check has failed.
fn of_devices(found: Result<Vec<Device>, Unavailable>, listed: &[Listed]) -> (Vec<Check>, Option<Device>) {
    let library = Check::ok(LIBRARY.0, LIBRARY.1, "libibverbs is loaded");
    let devices = match found {
        Ok(devices) => devices,
        Err(Unavailable::Library(reason)) => return (vec![no_library(&reason)], None),
        Err(Unavailable::NoDevices) => return (vec![library, no_device(listed)], None),
        Err(Unavailable::Refused { device, reason }) => {
            return (vec![library, refused(&device, &reason)], None);
        }
    };
    let mut checks = vec![library];
    let described: Vec<String> = devices.iter().map(described_device).collect();
    checks.push(Check::ok(DEVICE.0, DEVICE.1, described.join("; ")));
    let can_send = |device: &&Device| device.port(None).is_ok_and(|port| port.gid(None).is_ok());
    let Some(chosen) = devices.iter().find(can_send).or(devices.first()) else {
        return (vec![no_device(listed)], None);
    };
    let port = match chosen.port(None) {
        Ok(port) => port,
        Err(reason) => {
            let (found, remedy) = split(&reason);
            checks.push(Check::fail(PORT.0, PORT.1, found).remedy(remedy));
            return (checks, None);
        }
    };
    let link = if port.link_ethernet { "Ethernet" } else { "InfiniBand" };
    let found =
        format!("port {} of {} is active ({link}, packets of {} bytes)", port.number, chosen.name, port.mtu);
    checks.push(Check::ok(PORT.0, PORT.1, found));
    match port.gid(None) {
        Ok(gid) => {
            let check = match gid.roce_v2 || !port.link_ethernet {
                true => Check::ok(GID.0, GID.1, gid.to_string()),
                false => Check::warn(GID.0, GID.1, gid.to_string())
                    .because("routers do not forward RoCE v1")
                    .remedy("ip addr add ADDRESS dev INTERFACE   (gives the port an address of RoCE v2)"),
            };
            checks.push(check);
        }
        Err(reason) => {
            let (found, remedy) = split(&reason);
            checks.push(Check::fail(GID.0, GID.1, found).remedy(remedy));
            return (checks, None);
        }
    }
    (checks, Some(chosen.clone()))
}

const LIBRARY: (&str, &str) = ("verbs.library", "RDMA library");
const DEVICE: (&str, &str) = ("verbs.device", "RDMA device");
const PORT: (&str, &str) = ("verbs.port", "RDMA port");
const GID: (&str, &str) = ("verbs.gid", "RDMA address");
const LOCKED: (&str, &str) = ("verbs.memlock", "locked memory");

/// Splits an error's text into the failure and the remedy.
fn split(reason: &str) -> (&str, &str) {
    reason.split_once("; ").unwrap_or((reason, "farside info --devices   (lists ports and addresses)"))
}

fn no_library(reason: &str) -> Check {
    Check::fail(LIBRARY.0, LIBRARY.1, reason).remedy(
        "apt install libibverbs1 ibverbs-providers   (Debian, Ubuntu; elsewhere: dnf install libibverbs)",
    )
}

fn no_device(listed: &[Listed]) -> Check {
    let failed = |found: String| Check::fail(DEVICE.0, DEVICE.1, found);
    match described(listed) {
        Some(devices) => failed(format!("libibverbs finds none, but the system lists {devices}"))
            .because("its provider or the files in /dev/infiniband are missing")
            .remedy("apt install ibverbs-providers; modprobe ib_uverbs; in a container: --device /dev/infiniband"),
        None => failed("the system lists none".into())
            .remedy("load the NIC's driver; without a NIC: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0"),
    }
}

fn refused(device: &str, reason: &str) -> Check {
    Check::fail(DEVICE.0, DEVICE.1, format!("{device} {reason}"))
        .remedy("let this user open /dev/infiniband/uverbs*   (ls -l /dev/infiniband)")
}

fn described_device(device: &Device) -> String {
    let atomics = match device.atomics {
        Atomics::None => "no atomics",
        Atomics::Device => "atomics among its own requests",
        Atomics::Global => "atomics with the CPU",
    };
    let kind = if device.is_software { "in software, " } else { "" };
    format!("{}: {kind}{atomics}, up to {} queue pairs", device.name, device.limits.max_qp)
}

/// Judges the limit on locked memory. `limits` and `status` are the contents of `/proc/self/limits` and
/// `/proc/self/status`.
fn locked(limits: Option<&str>, status: Option<&str>) -> Check {
    const PLENTY: u64 = 1 << 30;
    if status.is_some_and(|status| has(status, Capability::IpcLock)) {
        return Check::ok(LOCKED.0, LOCKED.1, "unlimited by CAP_IPC_LOCK");
    }
    match limits.and_then(|limits| limit(limits, "Max locked memory")) {
        None => Check::unknown(LOCKED.0, LOCKED.1),
        Some((u64::MAX, _)) => Check::ok(LOCKED.0, LOCKED.1, "unlimited"),
        Some((now @ PLENTY.., _)) => Check::ok(LOCKED.0, LOCKED.1, format!("at most {}", human_bytes(now))),
        Some((now, _)) => Check::warn(LOCKED.0, LOCKED.1, format!("at most {}", human_bytes(now)))
            .because("a node registers memory that the NIC accesses, and both ends their buffers")
            .remedy(
                "ulimit -l unlimited; in a unit: LimitMEMLOCK=infinity; in a container: --ulimit memlock=-1",
            ),
    }
}

/// Runs the checks on arbitrary text instead of the system's files.
#[cfg(test)]
pub(super) fn of_any(text: &str) -> Vec<Check> {
    let listed = [Listed { name: text.into(), ports: vec![(text.into(), text.into())] }];
    let refused = Unavailable::Refused { device: text.into(), reason: text.into() };
    let mut checks = vec![reported(&listed), locked(Some(text), Some(text))];
    for unavailable in [Unavailable::Library(text.into()), Unavailable::NoDevices, refused] {
        checks.extend(of_devices(Err(unavailable), &listed).0);
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;
    use farside_fabrics::verbs::device::{Gid, Limits, Port};

    fn listed_device(name: &str, ports: &[(&str, &str)]) -> Listed {
        Listed {
            name: name.into(),
            ports: ports.iter().map(|&(state, link)| (state.into(), link.into())).collect(),
        }
    }

    fn gid(roce_v2: bool) -> Gid {
        let bytes = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7];
        Gid { index: 3, bytes, roce_v2, address: Some([10, 0, 0, 7].into()) }
    }

    fn device(name: &str, active: bool, gids: &[Gid]) -> Device {
        let limits = Limits {
            max_qp: 100,
            max_qp_wr: 1,
            max_sge: 1,
            max_cqe: 1,
            max_mr: 1,
            max_mr_size: 1 << 30,
            max_srq_wr: 1,
            max_qp_rd_atom: 1,
            max_qp_init_rd_atom: 1,
        };
        let port = Port { number: 1, active, link_ethernet: true, mtu: 1024, lid: 0, gids: gids.to_vec() };
        Device { name: name.into(), ports: vec![port], atomics: Atomics::Device, limits, is_software: false }
    }

    #[test]
    fn listed_devices_are_a_note() {
        is(&reported(&[]), Note, "the system lists no RDMA device (read from /sys only)", "");
        let two = [
            listed_device("mlx5_0", &[("4: ACTIVE\n", "InfiniBand\n"), ("1: DOWN\n", "Ethernet\n")]),
            listed_device("rxe0", &[("", "")]),
        ];
        is(&reported(&two), Note, "mlx5_0 (ACTIVE InfiniBand, DOWN Ethernet), rxe0 (read", "--fabric verbs");
    }

    #[test]
    fn what_is_missing_has_a_remedy() {
        let of = |found, listed: &[Listed]| {
            let (checks, usable) = of_devices(found, listed);
            assert_eq!(usable, None);
            checks.into_iter().next_back().expect("a check")
        };
        let soft = listed_device("rxe0", &[("4: ACTIVE\n", "Ethernet\n")]);
        let library = Unavailable::Library("libibverbs.so.1: cannot open shared object file".into());
        is(&of(Err(library), &[]), Fail, "libibverbs.so.1", "apt install libibverbs1 ibverbs-providers");
        is(&of(Err(Unavailable::NoDevices), &[]), Fail, "the system lists none", "modprobe rdma_rxe");
        is(
            &of(Err(Unavailable::NoDevices), std::slice::from_ref(&soft)),
            Fail,
            "libibverbs finds none, but the system lists rxe0 (ACTIVE Ethernet)",
            "apt install ibverbs-providers",
        );
        let refused =
            Unavailable::Refused { device: "rxe0".into(), reason: "cannot be opened: denied".into() };
        is(&of(Err(refused), &[soft]), Fail, "rxe0 cannot be opened: denied", "/dev/infiniband/uverbs*");
        let down = device("a0", false, &[gid(true)]);
        is(
            &of(Result::Ok(vec![down]), &[]),
            Fail,
            "port 1 of RDMA device a0 is down",
            "set its interface up",
        );
        let empty = device("a0", true, &[]);
        is(&of(Result::Ok(vec![empty]), &[]), Fail, "the GID table of port 1 is empty", "ip addr add");
    }

    #[test]
    fn the_first_device_that_can_send_is_tried() {
        let devices = vec![
            device("a0", false, &[gid(true)]),
            device("b0", true, &[]),
            device("c0", true, &[gid(true)]),
            device("d0", true, &[gid(true)]),
        ];
        let (checks, usable) = of_devices(Result::Ok(devices), &[]);
        assert_eq!(usable.map(|device| device.name).as_deref(), Some("c0"));
        is(&checks[1], Ok, "a0: atomics among its own requests, up to 100 queue pairs; b0: ", "");
        is(&checks[2], Ok, "port 1 of c0 is active (Ethernet, packets of 1024 bytes)", "");
        is(&checks[3], Ok, "GID 3 (10.0.0.7, RoCE v2)", "");
        let (checks, usable) = of_devices(Result::Ok(vec![device("a0", true, &[gid(false)])]), &[]);
        assert!(usable.is_some());
        is(&checks[3], Warn, "GID 3 (10.0.0.7)", "ip addr add");
    }

    #[test]
    fn a_low_limit_on_locked_memory_is_a_warning() {
        let of = |now: &str| format!("Max locked memory         {now:<21}unlimited            bytes\n");
        let may = |bits: &str| format!("CapEff:\t{bits}\n");
        let none = may("0000000000000000");
        is(&locked(Some(&of("8388608")), Some(&none)), Warn, "at most 8.0 MiB", "LimitMEMLOCK=infinity");
        is(&locked(Some(&of("8388608")), Some(&may("0000000000004000"))), Ok, "CAP_IPC_LOCK", "");
        is(&locked(Some(&of("unlimited")), Some(&none)), Ok, "unlimited", "");
        is(&locked(Some(&of("1073741824")), None), Ok, "1.0 GiB", "");
        is(&locked(None, Some(&none)), Note, "not known here", "");
    }
}
