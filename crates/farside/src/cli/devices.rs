//! `info --devices`: lists this machine's RDMA devices, with their ports and addresses.

use super::{Done, Failure, human_bytes};
use farside_fabrics::verbs::device::{Atomics, Device, Gid, Port, devices};
use std::net::Ipv6Addr;

/// Prints the devices: for people, or as one JSON object.
///
/// # Errors
/// There is no device, or none can be opened.
pub(super) fn print(json: bool) -> Done {
    let devices = devices().map_err(|unavailable| Failure::Error(unavailable.to_string()))?;
    if json {
        print_line!("{}", serde_json::json!({ "devices": devices.iter().map(object).collect::<Vec<_>>() }));
        return Ok(());
    }
    for device in &devices {
        let kind = if device.is_software { ", in software" } else { "" };
        print_line!("{}{kind}", device.name);
        print_line!("  atomics        {}", atomics(device));
        print_line!("  queue pairs    up to {}", device.limits.max_qp);
        print_line!("  regions        up to {}{}", device.limits.max_mr, largest(device.limits.max_mr_size));
        for port in &device.ports {
            let state = if port.active { "active" } else { "down" };
            print_line!("  port {:<10}{state}, {}, packets of {} bytes", port.number, link(port), port.mtu);
            for gid in &port.gids {
                let mark = if is_used(gid, port) { "  (used unless another is named)" } else { "" };
                print_line!("    {gid}{mark}");
            }
        }
    }
    Ok(())
}

fn object(device: &Device) -> serde_json::Value {
    let gid = |gid: &Gid, port: &Port| {
        serde_json::json!({
            "index": gid.index,
            "gid": Ipv6Addr::from(gid.bytes).to_string(),
            "address": gid.address,
            "roce_v2": gid.roce_v2,
            "used": is_used(gid, port),
        })
    };
    let port = |port: &Port| {
        serde_json::json!({
            "port": port.number,
            "active": port.active,
            "link": link(port),
            "mtu": port.mtu,
            "gids": port.gids.iter().map(|entry| gid(entry, port)).collect::<Vec<_>>(),
        })
    };
    serde_json::json!({
        "device": device.name,
        "software": device.is_software,
        "atomics": atomics(device),
        "max_queue_pairs": device.limits.max_qp,
        "max_regions": device.limits.max_mr,
        "max_region_bytes": device.limits.max_mr_size,
        "ports": device.ports.iter().map(port).collect::<Vec<_>>(),
    })
}

/// Whether a connection over the port uses this address unless the user names another.
fn is_used(gid: &Gid, port: &Port) -> bool {
    port.gid(None).is_ok_and(|chosen| chosen.index == gid.index)
}

/// Describes the largest region. Soft-RoCE reports the largest number in place of a limit.
fn largest(bytes: u64) -> String {
    if bytes == u64::MAX { String::new() } else { format!(", each up to {}", human_bytes(bytes)) }
}

fn atomics(device: &Device) -> &'static str {
    match device.atomics {
        Atomics::None => "none",
        Atomics::Device => "among the device's own requests",
        Atomics::Global => "also with the CPU",
    }
}

fn link(port: &Port) -> &'static str {
    if port.link_ethernet { "Ethernet" } else { "InfiniBand" }
}
